/* A program's own OCaml probes: which there are, which are on, and switching them while it runs.

   Link with -lprobes (libprobes.so, or libprobes.a and -lpthread -ldl -lm). Every function may be called
   from any thread, but not in a handler of signals. All text is UTF-8. Linux on amd64.

   Where a function fails, it says so by what it returns and, if `error` is not NULL, sets `*error` to a
   message that is to be freed with probes_error_free(); if it does not fail, `*error` stays as it was.

   Made by cbindgen from crates/probes-c/src/abi.rs; do not edit. */

#ifndef PROBES_H
#define PROBES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/**
 * What this header is for: a library whose probes_abi() returns another number is not to be used with
 * it. The number changes when something here is changed or removed, not when something is added.
 */
#define PROBES_ABI 1

/**
 * The probe is off.
 */
#define PROBES_DISABLED 0

/**
 * The probe is on.
 */
#define PROBES_ENABLED 1

/**
 * The sites of the probe and its counters disagree: somebody was interrupted, or an object that has it
 * too was loaded since. probes_set() repairs it.
 */
#define PROBES_INCONSISTENT 2

/**
 * The state could not be told.
 */
#define PROBES_FAILED -1

/**
 * The probes of this process, opened by probes_current().
 */
typedef struct Probes Probes;

/**
 * The state of one probe.
 */
typedef struct ProbesState {
  /**
   * Its name.
   */
  const char *name;
  /**
   * PROBES_DISABLED, PROBES_ENABLED or PROBES_INCONSISTENT.
   */
  int32_t state;
  /**
   * How many want it to be on.
   */
  uint16_t counter;
} ProbesState;

/**
 * The states of all probes.
 */
typedef struct ProbesStates {
  /**
   * How many there are.
   */
  uintptr_t len;
  /**
   * That many, sorted by name.
   */
  const struct ProbesState *probes;
} ProbesStates;

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * The number of the interface that this library has: PROBES_ABI of its own header.
 */
uint32_t probes_abi(void);

/**
 * Opens the probes of this process: of the program, and of all objects that it has loaded whenever
 * one of the functions below is called. NULL if there are none, or /proc is missing or not for us.
 *
 * A child after fork() has probes of its own, and opens them itself: what its parent has opened is
 * refused there.
 *
 * # Safety
 *
 * `error` is NULL or can be written.
 */
struct Probes *probes_current(char **error);

/**
 * Frees what probes_current() has returned; the probes stay as they are. Does nothing with NULL.
 *
 * # Safety
 *
 * `probes` is NULL or from probes_current(), and is not used by anybody any more.
 */
void probes_free(struct Probes *probes);

/**
 * Adds one to the counter of the probe `name`, and switches it on if it was off. False if that is not
 * done; then all is as it was, or the message says what is not.
 *
 * # Safety
 *
 * `probes` is from probes_current(), `name` a string, and `error` is NULL or can be written.
 */
bool probes_enable(const struct Probes *probes,
                   const char *name,
                   char **error);

/**
 * Takes one from the counter of the probe `name`, and switches it off if that was the last. False if
 * that is not done; a probe that is off is an error.
 *
 * # Safety
 *
 * As of probes_enable().
 */
bool probes_disable(const struct Probes *probes,
                    const char *name,
                    char **error);

/**
 * As probes_enable(), for all probes whose name the regular expression matches from its start on: at
 * least one.
 *
 * # Safety
 *
 * As of probes_enable().
 */
bool probes_enable_regexp(const struct Probes *probes,
                          const char *regexp,
                          char **error);

/**
 * As probes_disable(), for all probes whose name the regular expression matches from its start on;
 * those that are off stay so.
 *
 * # Safety
 *
 * As of probes_enable().
 */
bool probes_disable_regexp(const struct Probes *probes, const char *regexp, char **error);

/**
 * As probes_enable(), for all probes.
 *
 * # Safety
 *
 * `probes` is from probes_current(), and `error` is NULL or can be written.
 */
bool probes_enable_all(const struct Probes *probes, char **error);

/**
 * As probes_disable(), for all probes; those that are off stay so.
 *
 * # Safety
 *
 * As of probes_enable_all().
 */
bool probes_disable_all(const struct Probes *probes, char **error);

/**
 * Sets the counters of the probe `name` to 1 or 0 and switches all its sites on or off, whatever they
 * were: the way to repair a probe that is PROBES_INCONSISTENT, as it is when an object that has it too
 * was loaded while it was on.
 *
 * # Safety
 *
 * As of probes_enable().
 */
bool probes_set(const struct Probes *probes,
                const char *name,
                bool on,
                char **error);

/**
 * As probes_set(), for all probes.
 *
 * # Safety
 *
 * As of probes_enable_all().
 */
bool probes_set_all(const struct Probes *probes, bool on, char **error);

/**
 * The state of the probe `name`: PROBES_DISABLED, PROBES_ENABLED, PROBES_INCONSISTENT, or PROBES_FAILED.
 *
 * # Safety
 *
 * As of probes_enable().
 */
int32_t probes_state(const struct Probes *probes,
                     const char *name,
                     char **error);

/**
 * The states of all probes, to be freed with probes_states_free(); NULL if they cannot be told.
 *
 * # Safety
 *
 * As of probes_enable_all().
 */
struct ProbesStates *probes_states(const struct Probes *probes, char **error);

/**
 * Frees what probes_states() has returned. Does nothing with NULL.
 *
 * # Safety
 *
 * `states` is NULL or from probes_states(), and is not used by anybody any more.
 */
void probes_states_free(struct ProbesStates *states);

/**
 * Frees a message. Does nothing with NULL.
 *
 * # Safety
 *
 * `error` is NULL or was set by one of these functions, and is not used by anybody any more.
 */
void probes_error_free(char *error);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PROBES_H */
