/* A C program that loads an OCaml library, `embedded.so`, once it is told to.

     load PATH   answers `loaded`
     run         calls it with 1, answers `calls N`, N being what its handlers counted */

#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef intptr_t value;

static value *(*named_value)(const char *);
static value (*callback)(value, value);

static void *symbol(void *library, const char *name)
{
    void *found = dlsym(library, name);

    if (!found) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    return found;
}

static void load(const char *path)
{
    static char *argv[] = { "embedded", NULL };
    void *library = dlopen(path, RTLD_NOW);

    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        exit(3);
    }
    void (*startup)(char **) = (void (*)(char **))symbol(library, "caml_startup");
    named_value = (value *(*)(const char *))symbol(library, "caml_named_value");
    callback = (value (*)(value, value))symbol(library, "caml_callback");
    startup(argv);
}

int main(void)
{
    char line[256];

    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        line[strcspn(line, "\n")] = 0;
        if (strncmp(line, "load ", 5) == 0) {
            load(line + 5);
            printf("loaded\n");
        } else if (strcmp(line, "run") == 0) {
            /* OCaml represents the int n as 2n + 1 */
            value calls = callback(*named_value("call"), 3);
            printf("calls %ld\n", (long)(calls >> 1));
        } else
            printf("unknown command: %s\n", line);
        fflush(stdout);
    }
    return 0;
}
