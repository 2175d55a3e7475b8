/* What a program can do to itself that a tool might stumble over. */

#define _GNU_SOURCE
#define CAML_NAME_SPACE
#include <caml/mlvalues.h>
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <grp.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/personality.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#ifndef PR_SET_MDWE
#define PR_SET_MDWE 65
#endif

#define MAPS 1000
#define PAGE 4096
#define NOBODY 65534

/* More maps than one: neighbours differ in what may be done with them. */
value adversary_map_much(value unit)
{
    char *place = mmap(NULL, MAPS * PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    (void)unit;
    if (place == MAP_FAILED)
        return Val_false;
    for (int i = 0; i < MAPS; i += 2)
        if (mprotect(place + i * PAGE, PAGE, PROT_READ | PROT_WRITE) != 0)
            return Val_false;
    return Val_true;
}

/* All descriptors but those of the input and the outputs. */
value adversary_close_all(value unit)
{
    (void)unit;
    for (int fd = 3; fd < 1024; fd++)
        close(fd);
    return Val_true;
}

value adversary_set_personality(value unit)
{
    (void)unit;
    return Val_bool(personality(READ_IMPLIES_EXEC | ADDR_NO_RANDOMIZE) != -1);
}

/* What needs a privilege is only done with it. */

value adversary_change_root(value directory)
{
    if (geteuid() != 0)
        return Val_true;
    return Val_bool(chroot(String_val(directory)) == 0 && chdir("/") == 0);
}

value adversary_become_nobody(value unit)
{
    (void)unit;
    if (geteuid() != 0)
        return Val_true;
    return Val_bool(setgroups(0, NULL) == 0 && setresgid(NOBODY, NOBODY, NOBODY) == 0 &&
                    setresuid(NOBODY, NOBODY, NOBODY) == 0 && geteuid() == NOBODY);
}

/* A process that may not be dumped can only be traced by a tool with privileges: not by a user's own. */
value adversary_forbid(value dumps)
{
    if (Bool_val(dumps) && prctl(PR_SET_DUMPABLE, 0) != 0)
        return Val_false;
    return Val_bool(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
}

/* Since Linux 6.3; an older one has no such limit. With READ_IMPLIES_EXEC, the program could map no
   memory any more. */
value adversary_deny_write_execute(value unit)
{
    (void)unit;
    personality(ADDR_NO_RANDOMIZE);
    return Val_bool(prctl(PR_SET_MDWE, 1, 0, 0, 0) == 0 || errno == EINVAL);
}

static int threads(void)
{
    int count = 0;
    DIR *tasks = opendir("/proc/self/task");
    struct dirent *task;

    while (tasks && (task = readdir(tasks)))
        count += task->d_name[0] != '.';
    if (tasks)
        closedir(tasks);
    return count;
}

/* A child with the library has one thread, and may therefore enter a user namespace of its own, where users may. */
value adversary_enter_namespace(value library)
{
    int status;
    pid_t child = fork();

    if (child == 0) {
        if (!dlopen(String_val(library), RTLD_NOW | RTLD_LOCAL))
            _exit(1);
        if (threads() != 1)
            _exit(2);
        int is_refused = unshare(CLONE_NEWUSER) != 0 && errno == EINVAL;
        _exit(is_refused ? 3 : 0);
    }
    if (child < 0)
        return Val_int(4);
    while (waitpid(child, &status, 0) == -1)
        if (errno != EINTR)
            return Val_int(5);
    return Val_int(WIFEXITED(status) ? WEXITSTATUS(status) : 6);
}
