/* What only C can see of a process. */

#define _GNU_SOURCE
#define CAML_NAME_SPACE
#include <caml/alloc.h>
#include <caml/mlvalues.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/auxv.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

value adversary_environment(value unit)
{
    char *text = NULL;
    size_t size = 0;
    FILE *out = open_memstream(&text, &size);

    (void)unit;
    for (int signal = 1; signal < 65; signal++) {
        struct sigaction action;
        if (sigaction(signal, NULL, &action) == 0 && action.sa_handler != SIG_DFL)
            fprintf(out, "signal %d %s %x\n", signal,
                    action.sa_handler == SIG_IGN ? "ignored" : "handled", action.sa_flags);
    }
    int death = 0, reaper = 0;
    prctl(PR_GET_PDEATHSIG, &death);
    prctl(PR_GET_CHILD_SUBREAPER, &reaper);
    fprintf(out, "death signal %d, subreaper %d, dumpable %d, keeps capabilities %d\n",
            death, reaper, prctl(PR_GET_DUMPABLE), prctl(PR_GET_KEEPCAPS));
    stack_t stack;
    sigaltstack(NULL, &stack);
    fprintf(out, "signal stack %x %zu\n", stack.ss_flags, stack.ss_size);
    fprintf(out, "personality %x, secure %lu, executed as %s\n", personality(0xffffffff),
            getauxval(AT_SECURE), (const char *)getauxval(AT_EXECFN));
    fprintf(out, "nice %d, scheduler %d, break %d\n", getpriority(PRIO_PROCESS, 0),
            sched_getscheduler(0), sbrk(0) != (void *)-1);
    fprintf(out, "leads its group %d, leads its session %d\n", getpgrp() == getpid(),
            getsid(0) == getpid());
    fclose(out);
    value seen = caml_copy_string(text);
    free(text);
    return seen;
}
