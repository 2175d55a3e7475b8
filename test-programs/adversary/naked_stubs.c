/* Values that are addresses outside of OCaml's heap, of memory that looks like a block. */

#define CAML_NAME_SPACE
#include <caml/mlvalues.h>
#include <stdint.h>
#include <sys/mman.h>

enum { WORDS = 4096 / sizeof(value) };

/* Returns a string of 15 bytes in memory of its own; 0 if there is none. */
value adversary_map_string(value unit)
{
    value *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void)unit;
    if (page == MAP_FAILED)
        return Val_int(0);
    for (int i = 0; i < WORDS; i++)
        page[i] = (value)0x6161616161616161;
    page[0] = (value)((2 << 10) | String_tag);
    page[2] = (value)0x0061616161616161;
    return (value)(page + 1);
}

value adversary_unmap(value string)
{
    return Val_bool(munmap((value *)string - 1, 4096) == 0);
}
