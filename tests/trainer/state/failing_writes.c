/* Makes a filesystem fail for one process (LD_PRELOAD). $FAIL has rules separated by ";", each "write" or "fsync", an errno
 * and a part of a path, as in "fsync:5:manifest.json": that operation of such files fails with that error. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(const char *op, int fd) {
    const char *rule = getenv("FAIL");
    char link[64], path[4096], of[8], part[256];
    int number;
    if (!rule) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    for (; rule; rule = strchr(rule, ';'), rule = rule ? rule + 1 : NULL) {
        if (sscanf(rule, "%7[^:]:%d:%255[^;]", of, &number, part) != 3) abort();
        if (strcmp(of, op) || !strstr(path, part)) continue;
        errno = number;
        return 1;
    }
    return 0;
}

ssize_t write(int fd, const void *data, size_t size) {
    static ssize_t (*real)(int, const void *, size_t);
    if (!real) real = (ssize_t(*)(int, const void *, size_t))dlsym(RTLD_NEXT, "write");
    return fails("write", fd) ? -1 : real(fd, data, size);
}

int fsync(int fd) {
    static int (*real)(int);
    if (!real) real = (int (*)(int))dlsym(RTLD_NEXT, "fsync");
    return fails("fsync", fd) ? -1 : real(fd);
}
