/* Loads a library with probes, executes its sites, and unloads it. */

#define CAML_NAME_SPACE
#include <caml/mlvalues.h>
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>

value adversary_run_library(value path)
{
    void *library = dlopen(String_val(path), RTLD_NOW | RTLD_LOCAL);

    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return Val_int(1);
    }
    void (*run)(void) = (void (*)(void))dlsym(library, "plugin_run");
    if (!run)
        return Val_int(2);
    run();
    return Val_int(dlclose(library) ? 3 : 0);
}
