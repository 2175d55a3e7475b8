/* The program limits (setrlimit(2)) and locks (mlockall(2)) its own memory. */

#define CAML_NAME_SPACE
#include <caml/fail.h>
#include <caml/mlvalues.h>
#include <sys/mman.h>
#include <sys/resource.h>

static void limit(int resource, value bytes)
{
    struct rlimit limit;

    if (getrlimit(resource, &limit))
        caml_failwith("getrlimit");
    limit.rlim_cur = Long_val(bytes);
    if (setrlimit(resource, &limit))
        caml_failwith("setrlimit");
}

value adversary_limit_address_space(value bytes)
{
    limit(RLIMIT_AS, bytes);
    return Val_unit;
}

value adversary_limit_data(value bytes)
{
    limit(RLIMIT_DATA, bytes);
    return Val_unit;
}

/* Locks all memory, present and future; none if RLIMIT_MEMLOCK is too low. */
value adversary_lock_all(value unit)
{
    if (mlockall(MCL_CURRENT | MCL_FUTURE))
        munlockall();
    return unit;
}
