/* C functions that stacks.ml and ocaml5/suspended.ml call, some of which call OCaml code back. */

#include <alloca.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <caml/callback.h>
#include <caml/custom.h>
#include <caml/memory.h>
#include <caml/mlvalues.h>
#include <caml/signals.h>

#define FUNCTION __attribute__((noipa))

CAMLprim FUNCTION value stacks_call_back(value f, value n)
{
    CAMLparam2(f, n);
    CAMLlocal1(result);

    result = caml_callback(f, n);
    CAMLreturn(Val_long(Long_val(result) + 1));
}

/* The compiler addresses this frame by rbp, whose value is only in the register while read(2) waits. */
CAMLprim FUNCTION value stacks_wait_in_alloca(value descriptor, value n)
{
    size_t len = 16 * (size_t)Long_val(n) + 32;
    char *bytes = alloca(len);
    ssize_t found;

    memset(bytes, 1, len);
    caml_enter_blocking_section();
    found = read(Int_val(descriptor), bytes, 1);
    caml_leave_blocking_section();
    return Val_long(found + bytes[len - 1]);
}

/* Waits until the input of the program ends; it is called without caml_c_call. */
FUNCTION intnat stacks_wait_noalloc(intnat n)
{
    char byte;

    while (read(0, &byte, 1) > 0)
        ;
    return n;
}

/* Waits for a line of the input. */
static void wait_for_line(value unused)
{
    char byte;

    (void)unused;
    while (read(0, &byte, 1) > 0 && byte != '\n')
        ;
}

/* Returns a value whose collection waits for a line of the input. */
CAMLprim value stacks_waiting_value(value unused)
{
    static struct custom_operations operations = {
        .identifier = "waiting",
        .finalize = wait_for_line,
    };

    (void)unused;
    return caml_alloc_custom(&operations, sizeof(value), 0, 1);
}

/* Some of the arguments are passed on the stack. */
CAMLprim FUNCTION value stacks_many(value f, value a, value b, value c, value d, value e, value g, value h, value i)
{
    value sum = Val_long(Long_val(a) + Long_val(b) + Long_val(c) + Long_val(d) + Long_val(e) + Long_val(g) + Long_val(h));

    return Val_long(Long_val(caml_callback(f, sum)) + Long_val(i));
}

CAMLprim value stacks_no_bytecode(value unused)
{
    (void)unused;
    abort();
}
