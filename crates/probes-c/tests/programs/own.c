/* A fixture that switches its own probes, through probes.h. It follows the protocol of
   test-programs/fixtures, with these commands in addition

     open                 answers like those below; has to be the first command
     enable NAME, disable NAME, enable-regexp RE, disable-regexp RE, enable-all, disable-all
                          answers `done`, or `failed MESSAGE`
     state NAME           answers `state N`, or `failed MESSAGE`
     states               answers `states NAME=STATE/COUNTER ...`, or `failed MESSAGE`
     mistakes             calls all functions with NULL and with bytes that are not UTF-8, answers
                          `mistakes N`: how many did not fail
     fork                 a child calls a function with the probes that its parent opened, opens its own,
                          switches all on and runs the sites; answers `child MESSAGE` and `child hits ...`, then `forked`
     spin N               N threads that execute all sites without a pause
     churn PATH           a thread that loads an object, runs it and unloads it without a pause
     set-on NAME, set-off NAME
                          like `enable NAME` and `disable NAME`, but by probes_set()
     set N                like `toggle N 1`, but by probes_set_all()
     toggle N T           T threads, each of which switches all on and off N times; answers
                          `toggled FAILED WAITED`: the number of updates that failed because
                          another update held the lock for too long (WAITED), or otherwise (FAILED)
     report               answers `report A B ...`: rounds of each thread of `spin` and `churn`
     hide, show           makes itself undumpable, and dumpable again; answers `done`
     seal                 seals the code of the sites (mseal(2)); answers `done`, or `cannot`
     leave                the first thread exits, another reads the commands and answers `ready`
     forbid-code          from now on, writing one byte to a file fails with EIO, like /proc/PID/mem if
                          the kernel does not permit writes to code
     forbid-open          from now on, opening a file fails with EACCES */

#define _GNU_SOURCE

#include "target.h"
#include "probes.h"

#include <dlfcn.h>
#include <errno.h>
#include <linux/audit.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#define MAX_THREADS 16

static Probes *probes;

static struct worker {
    _Alignas(64) uint64_t rounds;
    char path[240];
} workers[MAX_THREADS];

static int working;

/* ---- Threads that execute sites ------------------------------------------ */

static void count(struct worker *worker)
{
    __atomic_add_fetch(&worker->rounds, 1, __ATOMIC_RELAXED);
}

__attribute__((noreturn))
static void *spin(void *argument)
{
    int functions;
    fixture_function **list = fixture_function_list(&functions);

    for (;;) {
        for (int i = 0; i < functions; i++)
            list[i](1, 3, 5, 7);
        count(argument);
    }
}

__attribute__((noreturn))
static void *churn(void *argument)
{
    struct worker *worker = argument;

    for (;;) {
        void *handle = dlopen(worker->path, RTLD_NOW | RTLD_LOCAL);
        if (!handle)
            fixture_broken(dlerror());
        void (*run)(void) = (void (*)(void))dlsym(handle, "plugin_run");
        if (!run)
            fixture_broken("not a plugin");
        run();
        dlclose(handle);
        count(worker);
    }
}

static void start(void *(*work)(void *), const char *path)
{
    pthread_t thread;
    struct worker *worker = &workers[working];

    if (working++ == MAX_THREADS)
        fixture_broken("too many threads");
    strncpy(worker->path, path, sizeof worker->path - 1);
    if (pthread_create(&thread, NULL, work, worker) != 0)
        fixture_broken("cannot start a thread");
    while (__atomic_load_n(&worker->rounds, __ATOMIC_RELAXED) == 0)
        sched_yield();
}

/* ---- Threads that switch probes ------------------------------------------ */

static uint64_t failed, waited;

static void retry_while_busy(bool (*update)(const Probes *, char **))
{
    char *error = NULL;

    while (!update(probes, &error)) {
        int busy = strstr(error, " is being changed by ") != NULL;
        __atomic_add_fetch(busy ? &waited : &failed, 1, __ATOMIC_RELAXED);
        if (!busy)
            fprintf(stderr, "%s\n", error);
        probes_error_free(error);
        if (!busy)
            return;
    }
}

struct job {
    uint64_t times;
    bool (*on)(const Probes *, char **);
    bool (*off)(const Probes *, char **);
};

static void *toggle(void *argument)
{
    struct job *job = argument;

    for (uint64_t i = 0; i < job->times; i++) {
        retry_while_busy(job->on);
        retry_while_busy(job->off);
    }
    return NULL;
}

static bool set_on(const Probes *probes, char **error)
{
    return probes_set_all(probes, true, error);
}

static bool set_off(const Probes *probes, char **error)
{
    return probes_set_all(probes, false, error);
}

static void toggle_all(struct job job, int threads)
{
    pthread_t thread[MAX_THREADS];

    failed = waited = 0;
    for (int i = 0; i < threads; i++)
        if (pthread_create(&thread[i], NULL, toggle, &job) != 0)
            fixture_broken("cannot start a thread");
    for (int i = 0; i < threads; i++)
        pthread_join(thread[i], NULL);
    printf("toggled %lu %lu\n", failed, waited);
}

/* ---- What the kernel forbids ---------------------------------------------- */

static void filter(const struct sock_filter *rules, unsigned short len)
{
    struct sock_fprog program = { len, (struct sock_filter *)rules };

    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0
        || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) != 0)
        fixture_broken("cannot filter system calls");
    printf("done\n");
}

#define LOAD(field) BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, field))
#define UNLESS(value, skip) BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, value, 0, skip)
#define RETURN(what) BPF_STMT(BPF_RET | BPF_K, what)

static void forbid_code(void)
{
    static const struct sock_filter rules[] = {
        LOAD(nr), UNLESS(SYS_pwrite64, 3),
        LOAD(args[2]), UNLESS(1, 1),
        RETURN(SECCOMP_RET_ERRNO | EIO),
        RETURN(SECCOMP_RET_ALLOW),
    };
    filter(rules, sizeof rules / sizeof *rules);
}

static void forbid_open(void)
{
    static const struct sock_filter rules[] = {
        LOAD(nr), UNLESS(SYS_openat, 1),
        RETURN(SECCOMP_RET_ERRNO | EACCES),
        RETURN(SECCOMP_RET_ALLOW),
    };
    filter(rules, sizeof rules / sizeof *rules);
}

static void set_dumpable(int dumpable)
{
    if (prctl(PR_SET_DUMPABLE, dumpable, 0, 0, 0) != 0)
        fixture_broken("cannot change whether it is dumpable");
    printf("done\n");
}

static void seal(void)
{
#ifndef SYS_mseal
#define SYS_mseal 462
#endif
    int functions;
    uintptr_t page = (uintptr_t)fixture_function_list(&functions)[0] & -4096;

    printf("%s\n", syscall(SYS_mseal, page, 4096, 0) == 0 ? "done" : "cannot");
}

/* ---- The first thread exits ----------------------------------------------- */

static void *read_commands_after_leader(void *none)
{
    (void)none;
    while (!fixture_leader_is_zombie())
        sched_yield();
    fixture_command_loop();
}

__attribute__((noreturn))
static void leave(void)
{
    pthread_t thread;

    if (pthread_create(&thread, NULL, read_commands_after_leader, NULL) != 0)
        fixture_broken("cannot start a thread");
    pthread_exit(NULL);
}

/* ---- Commands ------------------------------------------------------------------ */

static void answer(bool done, char *error)
{
    if (done)
        printf("done\n");
    else
        printf("failed %s\n", error);
    probes_error_free(error);
}

static void print_states(void)
{
    char *error = NULL;
    ProbesStates *states = probes_states(probes, &error);

    if (!states) {
        answer(false, error);
        return;
    }
    printf("states");
    for (size_t i = 0; i < states->len; i++)
        printf(" %s=%d/%u", states->probes[i].name, states->probes[i].state,
               states->probes[i].counter);
    printf("\n");
    probes_states_free(states);
}

static void make_mistakes(void)
{
    int wrong = 0;
    char *error = NULL;

    wrong += probes_enable(NULL, "ping", NULL);
    wrong += probes_enable(probes, NULL, NULL);
    wrong += probes_disable_all(NULL, NULL);
    wrong += probes_states(NULL, NULL) != NULL;
    wrong += probes_state(probes, "\xff", NULL) != PROBES_FAILED;
    wrong += probes_enable(probes, "\xff", &error);
    wrong += !error || strcmp(error, "the name \"\\xff\" is not UTF-8") != 0;
    probes_error_free(error);
    probes_error_free(NULL);
    probes_states_free(NULL);
    probes_free(NULL);
    wrong += probes_abi() != PROBES_ABI;
    printf("mistakes %d\n", wrong);
}

static void fork_child(void)
{
    fflush(stdout);
    pid_t child = fork();
    if (child == 0) {
        char *error = NULL;
        probes_enable(probes, "ping", &error);
        printf("child %s\n", error);
        probes_error_free(error);
        Probes *own = probes_current(NULL);
        if (!own || !probes_enable_all(own, NULL))
            fixture_broken("the child cannot switch its probes");
        probes_free(own);
        fixture_run();
        fixture_print_hits("child hits");
        fflush(stdout);
        _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    if (status != 0)
        fixture_broken("the child failed");
    printf("forked\n");
}

static bool set_on_named(const Probes *probes, const char *name, char **error)
{
    return probes_set(probes, name, true, error);
}

static bool set_off_named(const Probes *probes, const char *name, char **error)
{
    return probes_set(probes, name, false, error);
}

static int run_named_command(const char *line)
{
    static const struct {
        const char *command;
        bool (*update)(const Probes *, const char *, char **);
    } commands[] = {
        { "enable ", probes_enable },
        { "disable ", probes_disable },
        { "enable-regexp ", probes_enable_regexp },
        { "disable-regexp ", probes_disable_regexp },
        { "set-on ", set_on_named },
        { "set-off ", set_off_named },
    };
    for (size_t i = 0; i < sizeof commands / sizeof *commands; i++) {
        size_t len = strlen(commands[i].command);
        if (strncmp(line, commands[i].command, len) == 0) {
            char *error = NULL;
            bool done = commands[i].update(probes, line + len, &error);
            answer(done, error);
            return 1;
        }
    }
    return 0;
}

int fixture_command(const char *line)
{
    char path[240], *error = NULL;
    uint64_t times;
    int threads;

    if (strcmp(line, "open") == 0) {
        probes = probes_current(&error);
        answer(probes != NULL, error);
    } else if (run_named_command(line)) {
    } else if (strcmp(line, "enable-all") == 0) {
        bool done = probes_enable_all(probes, &error);
        answer(done, error);
    } else if (strcmp(line, "disable-all") == 0) {
        bool done = probes_disable_all(probes, &error);
        answer(done, error);
    } else if (strcmp(line, "states") == 0)
        print_states();
    else if (sscanf(line, "state %239s", path) == 1) {
        int state = probes_state(probes, path, &error);
        if (state == PROBES_FAILED)
            answer(false, error);
        else
            printf("state %d\n", state);
    } else if (strcmp(line, "mistakes") == 0)
        make_mistakes();
    else if (strcmp(line, "fork") == 0)
        fork_child();
    else if (sscanf(line, "spin %d", &threads) == 1) {
        for (int i = 0; i < threads; i++)
            start(spin, "");
        printf("done\n");
    } else if (sscanf(line, "churn %239[^\n]", path) == 1) {
        start(churn, path);
        printf("done\n");
    } else if (sscanf(line, "toggle %lu %d", &times, &threads) == 2 && threads <= MAX_THREADS)
        toggle_all((struct job){ times, probes_enable_all, probes_disable_all }, threads);
    else if (sscanf(line, "set %lu", &times) == 1)
        toggle_all((struct job){ times, set_on, set_off }, 1);
    else if (strcmp(line, "report") == 0) {
        printf("report");
        for (int i = 0; i < working; i++)
            printf(" %lu", __atomic_load_n(&workers[i].rounds, __ATOMIC_RELAXED));
        printf("\n");
    } else if (strcmp(line, "forbid-code") == 0)
        forbid_code();
    else if (strcmp(line, "forbid-open") == 0)
        forbid_open();
    else if (strcmp(line, "hide") == 0)
        set_dumpable(0);
    else if (strcmp(line, "show") == 0)
        set_dumpable(1);
    else if (strcmp(line, "seal") == 0)
        seal();
    else if (strcmp(line, "leave") == 0)
        leave();
    else
        return 0;
    fflush(stdout);
    return 1;
}
