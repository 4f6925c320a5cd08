/* Makes chosen calls on chosen files fail, end early, wait or kill, below the interpreter (LD_PRELOAD).
 *
 * IOFAULT="op:part:after:count:every:what[;...]"
 *   op     read, write, sync, reserve (fallocate), open, create (open that may), list (opendir),
 *          mkdir, unlink, rename, link, truncate
 *   part   of the path: of the name given, or of what the descriptor is open on
 *   after  calls that go through before the first one that is hit
 *   count  calls from there on of which the first, and then each that is ``every`` later, is hit
 *   what   eN fails with errno N     mN moves only N bytes, m-1 half of them, pages from a page on
 *          dN first waits N ms       k  kills the process before the call
 *          t  writes half of the bytes, then kills (other calls are made, then it kills)
 *          hN is held, then fails with errno N, or is made if N is 0: it says so in the FIFO
 *             $IOFAULT_HOLD/held.OP and waits for somebody who opens $IOFAULT_HOLD/go.OP to write
 * What a short read leaves out is overwritten, so that a caller who takes it for complete is seen.
 * Faults and counters lie in shared memory: a parent arms its child, and reads the counters of a
 * dead one.
 */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#define FAULTS 16
#define BLOCK 512
#define PAGE 4096
#define PATH 4096

typedef struct {
    char op[16], path[256], what;
    long after, count, every, value;
    atomic_long seen, hits;
} fault_t;

typedef struct {
    int faults;
    fault_t fault[FAULTS];
    char last[PATH]; /* the call that was counted last */
} shared_t;

static shared_t *shared;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void parse(const char *at) {
    while (at && *at && shared->faults < FAULTS) {
        fault_t *f = &shared->fault[shared->faults];
        if (sscanf(at, "%15[^:]:%255[^:]:%ld:%ld:%ld:%c%ld", f->op, f->path, &f->after, &f->count,
                   &f->every, &f->what, &f->value) == 7)
            shared->faults++;
        at = strchr(at, ';');
        if (at) at++;
    }
}

static void begin(void) {
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED) abort();
    parse(getenv("IOFAULT"));
}

__attribute__((constructor)) static void at_load(void) { pthread_once(&once, begin); }

/* Replaces the faults of a process, and of its children, that have no call in flight. */
void iofault_set(const char *text) {
    shared->faults = 0;
    memset(shared, 0, sizeof *shared);
    parse(text);
}

long iofault_seen(int i) { return shared->fault[i].seen; }
long iofault_hits(int i) { return shared->fault[i].hits; }
const char *iofault_last(void) { return shared->last; }

static void die(void) {
    kill(getpid(), SIGKILL);
    for (;;) pause();
}

static void *kill_later(void *delay) {
    usleep((useconds_t)(long)delay);
    die();
    return NULL;
}

/* Kills the process after a while, whatever its threads do then. */
void iofault_kill_in(long microseconds) {
    pthread_t thread;
    if (pthread_create(&thread, NULL, kill_later, (void *)microseconds)) abort();
    pthread_detach(thread);
}

/* What happens to a call: 'e' and 'm' are the caller's to do, 't' to write and then to kill. */
typedef struct {
    char what;
    long value;
} fate_t;

static int open_of(const char *what, const char *op, int flags) {
    char path[PATH];
    int fd;
    snprintf(path, sizeof path, "%s/%s.%s", getenv("IOFAULT_HOLD"), what, op);
    while ((fd = (int)syscall(SYS_open, path, flags)) < 0 && errno == EINTR) {} /* as a hung call */
    return fd;
}

static void hold(const char *op) {
    int fd = open_of("held", op, O_WRONLY);
    if (syscall(SYS_write, fd, "!", 1) < 0) perror("iofault: hold");
    close(fd);
    close(open_of("go", op, O_RDONLY));
}

static fate_t judge(const char *op, const char *path) {
    fate_t found = {0, 0};
    for (int i = 0; i < shared->faults; i++) {
        fault_t *f = &shared->fault[i];
        if (strcmp(f->op, op) || !strstr(path, f->path)) continue;
        snprintf(shared->last, sizeof shared->last, "%s %.4000s", op, path);
        long seen = atomic_fetch_add(&f->seen, 1);
        if (found.what || seen < f->after || seen - f->after >= f->count || (seen - f->after) % f->every) continue;
        atomic_fetch_add(&f->hits, 1);
        found = (fate_t){f->what, f->value};
    }
    if (found.what == 'k') die();
    if (found.what == 'd') {
        usleep((useconds_t)found.value * 1000);
        found.what = 0;
    }
    if (found.what == 'h') {
        hold(op);
        found.what = found.value ? 'e' : 0;
    }
    return found;
}

static int faulty(void) {
    pthread_once(&once, begin);
    return shared->faults;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return 1;
}

static fate_t fate(const char *op, int fd) {
    char path[PATH];
    int before = errno;
    fate_t found = {0, 0};
    if (faulty() && path_of(fd, path)) found = judge(op, path);
    errno = before;
    return found;
}

static fate_t fate_at(const char *op, int folder, const char *name) {
    char path[2 * PATH] = "";
    int before = errno;
    fate_t found = {0, 0};
    if (faulty() && name) {
        if (name[0] != '/') {
            int known = folder == AT_FDCWD ? getcwd(path, PATH) != NULL : path_of(folder, path);
            strcpy(path + (known ? strlen(path) : 0), "/");
        }
        strncat(path, name, PATH - 1);
        found = judge(op, path);
    }
    errno = before;
    return found;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) real = (__typeof__(real))dlsym(RTLD_NEXT, #name)

static size_t limit_of(fate_t f, size_t length) {
    if (f.what != 't' && f.value >= 0) return (size_t)f.value;
    size_t half = length - length / 2; /* never 0: of a byte all */
    return length < PAGE ? half : (half + PAGE - 1) / PAGE * PAGE;
}

static ssize_t read_short(ssize_t got, const struct iovec *v, int count, size_t limit) {
    size_t at = 0;
    if (got < 0 || (size_t)got <= limit) return got;
    for (int i = 0; i < count; at += v[i++].iov_len)
        for (size_t j = 0; j < v[i].iov_len; j++)
            if (at + j >= limit) ((char *)v[i].iov_base)[j] = (char)0xEE;
    return (ssize_t)limit;
}

/* Direct I/O cannot write part of a block: then fewer whole blocks are written than is said. */
#define WRITE_SHORT(call, length) ({ \
    size_t limit = limit_of(f, length), most = limit < (length) ? limit : (length), n = most; \
    ssize_t done = 0; \
    if (n) { done = call; if (done < 0 && errno == EINVAL && (n = most / BLOCK * BLOCK)) done = call; } \
    if (f.what == 't') die(); \
    done < 0 ? done : (ssize_t)most; })

#define FLAT(name, op, is_write, parameters, ...) \
    ssize_t name parameters { \
        REAL(name); \
        fate_t f = fate(op, fd); \
        size_t n = length; \
        if (!f.what) return real(fd, b, n __VA_ARGS__); \
        if (f.what == 'e') { errno = (int)f.value; return -1; } \
        if (is_write) return WRITE_SHORT(real(fd, b, n __VA_ARGS__), length); \
        struct iovec v = {(void *)b, length}; \
        size_t limit = limit_of(f, length); \
        if (!strcmp(#name, "read") && limit < n) n = limit; /* or the position were beyond it */ \
        return read_short(real(fd, b, n __VA_ARGS__), &v, 1, limit); \
    }

#define VECTOR(name, op, is_write, parameters, ...) \
    ssize_t name parameters { \
        REAL(name); \
        fate_t f = fate(op, fd); \
        if (!f.what) return real(fd, v, count, __VA_ARGS__); \
        if (f.what == 'e') { errno = (int)f.value; return -1; } \
        size_t length = 0; \
        for (int i = 0; i < count; i++) length += v[i].iov_len; \
        if (!is_write) return read_short(real(fd, v, count, __VA_ARGS__), v, count, limit_of(f, length)); \
        struct iovec first[1] = {v[0]}; \
        return WRITE_SHORT((first->iov_len = n, real(fd, first, 1, __VA_ARGS__)), v[0].iov_len); \
    }

#define SOME ,
FLAT(read, "read", 0, (int fd, void *b, size_t length))
FLAT(write, "write", 1, (int fd, const void *b, size_t length))
FLAT(pread, "read", 0, (int fd, void *b, size_t length, off_t offset), SOME offset)
FLAT(pread64, "read", 0, (int fd, void *b, size_t length, off_t offset), SOME offset)
FLAT(pwrite, "write", 1, (int fd, const void *b, size_t length, off_t offset), SOME offset)
FLAT(pwrite64, "write", 1, (int fd, const void *b, size_t length, off_t offset), SOME offset)

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

/* A call that either happens or fails; a short one of these cannot be. */
#define WHOLE(name, fate, failed, parameters, ...) \
    int name parameters { \
        REAL(name); \
        fate_t f = fate; \
        if (f.what == 'e' || f.what == 'm') { \
            int code = f.what == 'e' ? (int)f.value : EIO; \
            return failed; \
        } \
        int result = real(__VA_ARGS__); \
        if (f.what == 't') die(); \
        return result; \
    }
#define FAILED (errno = code, -1)

WHOLE(fsync, fate("sync", fd), FAILED, (int fd), fd)
WHOLE(fdatasync, fate("sync", fd), FAILED, (int fd), fd)
WHOLE(syncfs, fate("sync", fd), FAILED, (int fd), fd)
WHOLE(posix_fallocate, fate("reserve", fd), code, (int fd, off_t at, off_t n), fd, at, n)
WHOLE(posix_fallocate64, fate("reserve", fd), code, (int fd, off_t at, off_t n), fd, at, n)
WHOLE(fallocate, fate("reserve", fd), FAILED, (int fd, int mode, off_t at, off_t n), fd, mode, at, n)
WHOLE(fallocate64, fate("reserve", fd), FAILED, (int fd, int mode, off_t at, off_t n), fd, mode, at, n)
WHOLE(ftruncate, fate("truncate", fd), FAILED, (int fd, off_t n), fd, n)
WHOLE(ftruncate64, fate("truncate", fd), FAILED, (int fd, off_t n), fd, n)
WHOLE(truncate, fate_at("truncate", AT_FDCWD, p), FAILED, (const char *p, off_t n), p, n)
WHOLE(truncate64, fate_at("truncate", AT_FDCWD, p), FAILED, (const char *p, off_t n), p, n)
WHOLE(mkdir, fate_at("mkdir", AT_FDCWD, p), FAILED, (const char *p, mode_t m), p, m)
WHOLE(mkdirat, fate_at("mkdir", d, p), FAILED, (int d, const char *p, mode_t m), d, p, m)
WHOLE(unlink, fate_at("unlink", AT_FDCWD, p), FAILED, (const char *p), p)
WHOLE(rmdir, fate_at("unlink", AT_FDCWD, p), FAILED, (const char *p), p)
WHOLE(unlinkat, fate_at("unlink", d, p), FAILED, (int d, const char *p, int g), d, p, g)
WHOLE(rename, fate_at("rename", AT_FDCWD, q), FAILED, (const char *p, const char *q), p, q)
WHOLE(renameat, fate_at("rename", e, q), FAILED, (int d, const char *p, int e, const char *q), d, p, e, q)
WHOLE(symlink, fate_at("link", AT_FDCWD, q), FAILED, (const char *p, const char *q), p, q)
WHOLE(symlinkat, fate_at("link", d, q), FAILED, (const char *p, int d, const char *q), p, d, q)
WHOLE(link, fate_at("link", AT_FDCWD, q), FAILED, (const char *p, const char *q), p, q)
WHOLE(linkat, fate_at("link", e, q), FAILED, (int d, const char *p, int e, const char *q, int g), d, p, e, q, g)

#define OPEN(name, folder, given, ...) \
    int name(given const char *p, int flags, ...) { \
        REAL(name); \
        va_list rest; \
        va_start(rest, flags); \
        int creates = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE; \
        mode_t mode = creates ? va_arg(rest, mode_t) : 0; \
        va_end(rest); \
        fate_t f = fate_at(creates ? "create" : "open", folder, p); \
        if (f.what == 'e' || f.what == 'm') { errno = f.what == 'e' ? (int)f.value : EIO; return -1; } \
        int fd = real(__VA_ARGS__); \
        if (f.what == 't') die(); \
        return fd; \
    }
OPEN(open, AT_FDCWD, , p, flags, mode)
OPEN(open64, AT_FDCWD, , p, flags, mode)
OPEN(openat, d, int d SOME, d, p, flags, mode)
OPEN(openat64, d, int d SOME, d, p, flags, mode)

DIR *opendir(const char *p) {
    REAL(opendir);
    fate_t f = fate_at("list", AT_FDCWD, p);
    if (f.what == 'e' || f.what == 'm') { errno = f.what == 'e' ? (int)f.value : EIO; return NULL; }
    return real(p);
}
