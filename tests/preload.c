/* Fails reads of files below $FAULT_DIR with EIO after $FAULT_AFTER of them. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static atomic_long seen;

static int fails(int fd) {
    const char *dirs = getenv("FAULT_DIR");
    const char *after = getenv("FAULT_AFTER");
    char link[64], path[4096];
    if (!dirs || !after) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t len = readlink(link, path, sizeof path - 1);
    if (len <= 0) return 0;
    path[len] = 0;
    size_t n = strlen(dirs);
    return !strncmp(path, dirs, n) && strstr(path, ".mxfp4") && atomic_fetch_add(&seen, 1) >= atol(after);
}

#define READ(name)                                                          \
    ssize_t name(int fd, void *bytes, size_t len, off_t at) {               \
        static ssize_t (*next)(int, void *, size_t, off_t);                 \
        if (!next) next = dlsym(RTLD_NEXT, #name);                          \
        if (fails(fd)) { errno = EIO; return -1; }                          \
        return next(fd, bytes, len, at);                                    \
    }

READ(pread)
READ(pread64)
