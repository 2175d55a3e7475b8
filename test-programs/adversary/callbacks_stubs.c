/* Calls OCaml from threads of C, and leaves C by longjmp where OCaml permits it: when no OCaml
   code is on the stack between. */

#define CAML_NAME_SPACE
#include <caml/callback.h>
#include <caml/memory.h>
#include <caml/mlvalues.h>
#include <caml/threads.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdlib.h>

struct work {
    pthread_t thread;
    long calls, broken;
};

static void *call(void *argument)
{
    struct work *work = argument;

    if (!caml_c_thread_register()) {
        work->broken++;
        return NULL;
    }
    for (long n = 1; n <= work->calls; n++) {
        caml_acquire_runtime_system();
        value result = caml_callback_exn(*caml_named_value("adversary visit"), Val_long(n));
        int is_refused = Is_exception_result(result);
        if (is_refused != (n % 5 == 0) || (!is_refused && Long_val(result) != 2 * n))
            work->broken++;
        caml_release_runtime_system();
    }
    caml_c_thread_unregister();
    return NULL;
}

/* How many calls went wrong. */
value adversary_in_threads(value threads, value calls)
{
    long count = Long_val(threads), broken = 0;
    struct work work[16] = { 0 };

    for (long i = 0; i < count; i++)
        work[i].calls = Long_val(calls);
    caml_release_runtime_system();
    for (long i = 0; i < count; i++)
        if (pthread_create(&work[i].thread, NULL, call, &work[i]))
            abort();
    for (long i = 0; i < count; i++) {
        pthread_join(work[i].thread, NULL);
        broken += work[i].broken;
    }
    caml_acquire_runtime_system();
    return Val_long(broken);
}

static jmp_buf leave;

static int compare(const void *a, const void *b)
{
    value result = caml_callback2_exn(*caml_named_value("adversary compare"),
                                      Val_long(*(const long *)a), Val_long(*(const long *)b));

    if (Is_exception_result(result))
        longjmp(leave, 1);
    return Int_val(result);
}

/* 0 if the numbers were sorted, 1 if the callback raised, 2 if they are not sorted. */
value adversary_sort(value count)
{
    long numbers[100], all = Long_val(count);

    for (long i = 0; i < all; i++)
        numbers[i] = (i * 37) % all;
    if (setjmp(leave))
        return Val_int(1);
    qsort(numbers, all, sizeof numbers[0], compare);
    for (long i = 1; i < all; i++)
        if (numbers[i - 1] > numbers[i])
            return Val_int(2);
    return Val_int(0);
}

/* Calls f; an exception passes. */
value adversary_through(value f, value n)
{
    CAMLparam1(f);

    CAMLreturn(caml_callback(f, n));
}
