/* Makes chosen transfers of chosen files fail or end early, below the interpreter (LD_PRELOAD).
 *
 * IOFAULT="op:substring:after:count:what[;...]"
 *   op         read, write, sync, or reserve (posix_fallocate)
 *   substring  of the path that the descriptor is open on
 *   after      calls that go through before the first one that is hit
 *   count      calls that are hit
 *   what       > 0: fails with this errno; <= 0: moves only -what bytes;
 *              10000 + n: is held, then fails with errno n, or goes through if n is 0
 * A held call says so in the FIFO $IOFAULT_HOLD/held.OP, and waits for somebody who opens
 * $IOFAULT_HOLD/go.OP for writing.
 * What a short read leaves out is overwritten, so that a caller who takes it for complete is seen.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define FAULTS 8
#define BLOCK 512
#define NONE 1000000
#define HELD 10000

typedef struct {
    char op[16], path[256];
    long after, count;
    int what;
    atomic_long seen;
} fault_t;

static fault_t faults[FAULTS];
static int n_faults;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void parse(const char *at) {
    while (at && *at && n_faults < FAULTS) {
        fault_t *f = &faults[n_faults];
        if (sscanf(at, "%15[^:]:%255[^:]:%ld:%ld:%d", f->op, f->path, &f->after, &f->count, &f->what) == 5)
            n_faults++;
        at = strchr(at, ';');
        if (at) at++;
    }
}

static void from_environment(void) { parse(getenv("IOFAULT")); }

/* Replaces the faults of a process that has no transfer in flight. */
void iofault_set(const char *text) {
    pthread_once(&once, from_environment);
    memset(faults, 0, sizeof faults);
    n_faults = 0;
    parse(text);
}

static int open_of(const char *what, const char *op, int flags) {
    char path[4096];
    int fd;
    snprintf(path, sizeof path, "%s/%s.%s", getenv("IOFAULT_HOLD"), what, op);
    while ((fd = open(path, flags)) < 0 && errno == EINTR) {} /* a hung transfer ignores signals */
    return fd;
}

static void hold(const char *op) {
    int fd = open_of("held", op, O_WRONLY);
    if (write(fd, "!", 1) < 0) perror("iofault: hold");
    close(fd);
    close(open_of("go", op, O_RDONLY));
}

/* What happens to this call: an errno, minus a number of bytes, or NONE. Every fault counts it. */
static int fate(const char *op, int fd) {
    char link[64], path[4096];
    int found = NONE;
    pthread_once(&once, from_environment);
    if (!n_faults) return NONE;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return NONE;
    path[n] = 0;
    for (int i = 0; i < n_faults; i++) {
        fault_t *f = &faults[i];
        if (strcmp(f->op, op) || !strstr(path, f->path)) continue;
        long seen = atomic_fetch_add(&f->seen, 1);
        if (found == NONE && seen >= f->after && seen < f->after + f->count) found = f->what;
    }
    if (found >= HELD && found != NONE) {
        hold(op);
        return found == HELD ? NONE : found - HELD;
    }
    return found;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

static ssize_t read_short(ssize_t got, const struct iovec *v, int count, size_t limit) {
    size_t at = 0;
    if (got < 0 || (size_t)got <= limit) return got;
    for (int i = 0; i < count; at += v[i++].iov_len)
        for (size_t j = 0; j < v[i].iov_len; j++)
            if (at + j >= limit) ((char *)v[i].iov_base)[j] = (char)0xEE;
    return (ssize_t)limit;
}

/* Direct I/O cannot write part of a block: then fewer whole blocks are written than is said. */
#define WRITE_SHORT(call, length, limit) ({ \
    size_t most = (limit) < (length) ? (limit) : (length), n = most; \
    ssize_t done = 0; \
    if (n) { done = call; if (done < 0 && errno == EINVAL && (n = most / BLOCK * BLOCK)) done = call; } \
    done < 0 ? done : (ssize_t)most; })

#define FLAT(name, op, buffer_t, is_write) \
    ssize_t name(int fd, buffer_t *b, size_t length, off_t offset) { \
        REAL(name); \
        int what = fate(op, fd); \
        if (what == NONE) return real(fd, b, length, offset); \
        if (what > 0) { errno = what; return -1; } \
        if (is_write) return WRITE_SHORT(real(fd, b, n, offset), length, (size_t)-what); \
        struct iovec v = {(void *)b, length}; \
        return read_short(real(fd, b, length, offset), &v, 1, (size_t)-what); \
    }

#define VECTOR(name, op, is_write, parameters, ...) \
    ssize_t name parameters { \
        REAL(name); \
        int what = fate(op, fd); \
        if (what == NONE) return real(fd, v, count, __VA_ARGS__); \
        if (what > 0) { errno = what; return -1; } \
        if (!is_write) return read_short(real(fd, v, count, __VA_ARGS__), v, count, (size_t)-what); \
        struct iovec first[1] = {v[0]}; \
        (void)count; \
        return WRITE_SHORT((first->iov_len = n, real(fd, first, 1, __VA_ARGS__)), v[0].iov_len, (size_t)-what); \
    }

FLAT(pread, "read", void, 0)
FLAT(pread64, "read", void, 0)
FLAT(pwrite, "write", const void, 1)
FLAT(pwrite64, "write", const void, 1)

#define PLAIN (int fd, const struct iovec *v, int count, off_t offset)
#define FLAGS (int fd, const struct iovec *v, int count, off_t offset, int flags)
VECTOR(preadv, "read", 0, PLAIN, offset)
VECTOR(preadv64, "read", 0, PLAIN, offset)
VECTOR(preadv2, "read", 0, FLAGS, offset, flags)
VECTOR(preadv64v2, "read", 0, FLAGS, offset, flags)
VECTOR(pwritev, "write", 1, PLAIN, offset)
VECTOR(pwritev64, "write", 1, PLAIN, offset)
VECTOR(pwritev2, "write", 1, FLAGS, offset, flags)
VECTOR(pwritev64v2, "write", 1, FLAGS, offset, flags)

#define SYNC(name) \
    int name(int fd) { \
        REAL(name); \
        int what = fate("sync", fd); \
        if (what == NONE) return real(fd); \
        errno = what > 0 ? what : EIO; \
        return -1; \
    }
SYNC(fsync)
SYNC(fdatasync)
SYNC(syncfs)

#define RESERVE(name) \
    int name(int fd, off_t offset, off_t length) { \
        REAL(name); \
        int what = fate("reserve", fd); \
        return what == NONE ? real(fd, offset, length) : what > 0 ? what : ENOSPC; \
    }
RESERVE(posix_fallocate)
RESERVE(posix_fallocate64)
