/* Calls libprobes, which is loaded at run time, not linked: a program can be built without
   the library; if it does not find the library at run time, it gets an exception and can continue.

   A call holds the runtime lock. It waits for nothing that needs the lock, and runs no OCaml code: an
   OCaml signal handler that ran during the call could call libprobes again. */

#include "probes.h"

#include <dlfcn.h>
#include <stdio.h>
#include <string.h>

#define CAML_NAME_SPACE
#include <caml/alloc.h>
#include <caml/callback.h>
#include <caml/custom.h>
#include <caml/fail.h>
#include <caml/memory.h>
#include <caml/mlvalues.h>

#define FUNCTIONS(DO)                                                     \
    DO(abi) DO(current) DO(free) DO(enable) DO(disable) DO(enable_regexp) \
    DO(disable_regexp) DO(enable_all) DO(disable_all) DO(set) DO(set_all) \
    DO(state) DO(states) DO(states_free) DO(error_free)

#define FIELD(name) __typeof__(probes_##name) *name;

/* The content of a value of type `t`. */
struct self {
    FUNCTIONS(FIELD)
    Probes *probes;
};

#define SELF(value) ((struct self *)Data_custom_val(value))

/* ---- Errors ---------------------------------------------------------------- */

static void raise_error(const char *message)
{
    const value *error = caml_named_value("Probes_self.Error");

    if (error == NULL)
        caml_failwith(message);
    caml_raise_with_string(*error, message);
}

/* Raises Error with the message of a failed call, and frees the message. OCaml values may move from here on. */
static void raise_and_free(void (*error_free)(char *), char *message)
{
    CAMLparam0();
    CAMLlocal1(copy);

    copy = caml_copy_string(message);
    error_free(message);
    raise_error(String_val(copy));
    CAMLnoreturn;
}

/* Returns an OCaml string as a C string, valid until something is allocated in the OCaml heap. */
static const char *c_string_of(value text)
{
    if (strlen(String_val(text)) != caml_string_length(text))
        raise_error("a name, regular expression or path contains a NUL byte");
    return String_val(text);
}

/* ---- The library ------------------------------------------------------------ */

static void finalize(value v)
{
    SELF(v)->free(SELF(v)->probes);
}

static struct custom_operations operations = {
    "probes_self.t",
    finalize,
    custom_compare_default,
    custom_hash_default,
    custom_serialize_default,
    custom_deserialize_default,
    custom_compare_ext_default,
    custom_fixed_length_default,
};

static void raise_not_loaded(const char *reason)
{
    char message[512];

    snprintf(message, sizeof message, "cannot load libprobes: %s", reason);
    raise_error(message);
}

#define LOOK_UP(name)                                                      \
    self.name = (__typeof__(self.name))dlsym(library, "probes_" #name);     \
    if (self.name == NULL)                                                 \
        raise_not_loaded(dlerror());

CAMLprim value probes_self_current(value path)
{
    CAMLparam1(path);
    CAMLlocal1(result);
    struct self self = { 0 };
    char *error = NULL;

    /* Never unloaded: threads may use it until they exit. */
    void *library = dlopen(c_string_of(path), RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (library == NULL)
        raise_not_loaded(dlerror());
    FUNCTIONS(LOOK_UP)
    if (self.abi() != PROBES_ABI) {
        char reason[128];

        snprintf(reason, sizeof reason,
                 "its interface has version %d, but this program was built for version %d",
                 (int)self.abi(), (int)PROBES_ABI);
        raise_not_loaded(reason);
    }
    self.probes = self.current(&error);
    if (self.probes == NULL)
        raise_and_free(self.error_free, error);
    result = caml_alloc_custom(&operations, sizeof self, 0, 1);
    *SELF(result) = self;
    CAMLreturn(result);
}

/* ---- Calls ------------------------------------------------------------------ */

CAMLprim value probes_self_update(value v, value update, value argument)
{
    CAMLparam3(v, update, argument);
    const struct self *self = SELF(v);
    const char *name = c_string_of(argument);
    char *error = NULL;
    bool done = false;

    /* In the order of the constructors of `update` in probes_self.ml. */
    switch (Int_val(update)) {
    case 0: done = self->enable(self->probes, name, &error); break;
    case 1: done = self->disable(self->probes, name, &error); break;
    case 2: done = self->enable_regexp(self->probes, name, &error); break;
    case 3: done = self->disable_regexp(self->probes, name, &error); break;
    case 4: done = self->enable_all(self->probes, &error); break;
    case 5: done = self->disable_all(self->probes, &error); break;
    case 6: done = self->set(self->probes, name, true, &error); break;
    case 7: done = self->set(self->probes, name, false, &error); break;
    case 8: done = self->set_all(self->probes, true, &error); break;
    case 9: done = self->set_all(self->probes, false, &error); break;
    }
    if (!done)
        raise_and_free(self->error_free, error);
    CAMLreturn(Val_unit);
}

CAMLprim value probes_self_state(value v, value name)
{
    CAMLparam2(v, name);
    const struct self *self = SELF(v);
    char *error = NULL;
    int state = self->state(self->probes, c_string_of(name), &error);

    if (state == PROBES_FAILED)
        raise_and_free(self->error_free, error);
    CAMLreturn(Val_int(state));
}

CAMLprim value probes_self_states(value v)
{
    CAMLparam1(v);
    CAMLlocal3(rows, row, name);
    /* A copy: the original may move from here on. */
    struct self self = *SELF(v);
    char *error = NULL;
    ProbesStates *states = self.states(self.probes, &error);

    if (states == NULL)
        raise_and_free(self.error_free, error);
    rows = caml_alloc(states->len, 0);
    for (size_t i = 0; i < states->len; i++) {
        const ProbesState *state = &states->probes[i];
        name = caml_copy_string(state->name);
        row = caml_alloc_tuple(3);
        Store_field(row, 0, name);
        Store_field(row, 1, Val_int(state->state));
        Store_field(row, 2, Val_int(state->counter));
        Store_field(rows, i, row);
    }
    self.states_free(states);
    CAMLreturn(rows);
}
