/* Spoils reads of expert files below $FAULT_DIR, after $FAULT_AFTER of them, as $FAULT_KIND says:
 *   eio      fails with EIO
 *   einval   fails with EINVAL where the file is open past the page cache
 *   hang     never returns
 *   slow     takes 20 ms more
 *   short    gives a part of what was asked for, or is interrupted, in turns */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long seen;

/* Number of this spoiled read, from 0; negative for one to leave alone. */
static long number(int fd) {
    const char *dir = getenv("FAULT_DIR");
    const char *after = getenv("FAULT_AFTER");
    char link[64], path[4096];
    if (!dir || !after) return -1;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, path, sizeof path - 1);
    if (len <= 0) return -1;
    path[len] = 0;
    if (strncmp(path, dir, strlen(dir)) || !strstr(path, ".mxfp4")) return -1;
    return atomic_fetch_add(&seen, 1) - atol(after);
}

static int is(const char *kind) {
    const char *asked = getenv("FAULT_KIND");
    return !strcmp(asked ? asked : "eio", kind);
}

typedef ssize_t reading(int, void *, size_t, off_t);

static ssize_t spoiled(reading *next, int fd, void *bytes, size_t len, off_t at) {
    long spoiled = number(fd);
    if (spoiled < 0) return next(fd, bytes, len, at);
    if (is("hang")) for (;;) pause();
    if (is("slow")) usleep(20000);
    if (is("eio")) { errno = EIO; return -1; }
    if (is("einval") && fcntl(fd, F_GETFL) & O_DIRECT) { errno = EINVAL; return -1; }
    if (is("short") && spoiled % 3 == 1) { errno = EINTR; return -1; }
    if (is("short") && spoiled % 3 == 2 && len > 4096) len = len / 2 / 4096 * 4096 + (len < 8192 ? 4096 : 0);
    return next(fd, bytes, len, at);
}

#define READ(name)                                                          \
    ssize_t name(int fd, void *bytes, size_t len, off_t at) {               \
        static reading *next;                                               \
        if (!next) next = (reading *)dlsym(RTLD_NEXT, #name);               \
        return spoiled(next, fd, bytes, len, at);                           \
    }

READ(pread)
READ(pread64)
