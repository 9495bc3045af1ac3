/* Counts what a process writes, and ends it at the n-th write.

   Loaded with LD_PRELOAD, it sees every call that changes a file below one folder, or that sends to one port: those
   of Lance, which is written in Rust, as well as Python's. It does nothing until `gare_arm` is called. Calls that it
   counts are made one at a time, so that their order is the order of the trace. Some Rust libraries ask the kernel
   without libc: what changes names is caught there by a seccomp filter, which lets nobody through but this file.

   tests/write_shim.py compiles it and explains what the modes mean. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <ucontext.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum { COUNT = 0, BEFORE = 1, TORN = 2, AFTER = 3, CUT = 4 };
enum { MAX_FDS = 65536 };

static char root[PATH_MAX];
static size_t root_length;
static int watched_port, only_requests;
static long stop_at, num_seen;
static int mode, trace = -1;
static volatile int armed;
static unsigned char is_request[MAX_FDS]; /* a request that changes something is being sent here */
static pthread_mutex_t turn = PTHREAD_RECURSIVE_MUTEX_INITIALIZER_NP;

/* A system call from a place that the filter knows. */
long gare_syscall(long number, ...);
__asm__(".text\n.globl gare_syscall\n.hidden gare_after\n.globl gare_after\n"
        "gare_syscall:\n"
        "mov %rdi, %rax\n mov %rsi, %rdi\n mov %rdx, %rsi\n mov %rcx, %rdx\n mov %r8, %r10\n mov %r9, %r8\n"
        "mov 8(%rsp), %r9\n syscall\n"
        "gare_after:\n ret\n");
extern char gare_after[] __attribute__((visibility("hidden")));

static long checked(long result) {
    if (result >= 0) return result;
    errno = -result;
    return -1;
}
#define syscall(...) checked(gare_syscall(__VA_ARGS__, 0L, 0L, 0L, 0L, 0L, 0L))

#define REAL(name) ((__typeof__(&name))real(#name))
static void *real(const char *name) { return dlsym(RTLD_NEXT, name); }

static void die(void) {
    syscall(SYS_kill, getpid(), SIGKILL);
    for (;;) pause();
}

static void complain(const char *what, const char *path) {
    dprintf(2, "write_shim: %s on %s cannot be followed\n", what, path);
    _exit(86);
}

static int is_below(const char *path) {
    return root_length && !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

static int fd_path(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, out, PATH_MAX - 1);
    if (length < 0) return 0;
    out[length] = 0;
    return 1;
}

static int full_path(int folder, const char *path, char *out) {
    char start[PATH_MAX];
    if (!path) return 0;
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
    } else {
        if (folder == AT_FDCWD ? !getcwd(start, sizeof start) : !fd_path(folder, start)) return 0;
        size_t used = strlen(start), added = strlen(path);
        if (used + added + 2 > PATH_MAX) return 0;
        memmove(out, start, used);
        out[used] = '/';
        memcpy(out + used + 1, path, added + 1);
    }
    size_t length = strlen(out);
    while (length > 1 && out[length - 1] == '/') out[--length] = 0;
    return 1;
}

/* --- the trace: kind, two names, a number, data ---------------------------------------------------------------- */

static void put(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t done = syscall(SYS_write, trace, at, size);
        if (done <= 0) complain("the trace", "its file");
        at += done, size -= done;
    }
}

static void note(char kind, const char *one, const char *two, uint64_t number, const void *data, uint64_t size) {
    if (trace < 0) return;
    uint32_t lengths[2] = {strlen(one), strlen(two)};
    uint64_t numbers[2] = {number, size};
    put(&kind, 1), put(lengths, sizeof lengths), put(numbers, sizeof numbers);
    put(one, lengths[0]), put(two, lengths[1]), put(data, size);
}

/* Whether this write is the one to stop at. */
static int counted(void) {
    num_seen++;
    if (mode == COUNT || num_seen != stop_at) return 0;
    if (mode == BEFORE) die();
    return 1;
}

#define BEGIN_NAME(kind, one, two)                  \
    pthread_mutex_lock(&turn);                      \
    int stops = counted()
#define END_NAME(kind, one, two)                    \
    note(result < 0 ? 'N' : kind, one, two, 0, "", 0); \
    if (stops) die();                               \
    pthread_mutex_unlock(&turn)

static int catch_all(void);

int gare_arm(const char *folder, int port, int requests, long n, int how, int trace_fd) {
    if (catch_all()) return -1;
    snprintf(root, sizeof root, "%s", folder);
    root_length = strlen(root);
    watched_port = port, only_requests = requests, stop_at = n, mode = how, trace = trace_fd;
    num_seen = 0;
    armed = 1;
    return 0;
}
long gare_disarm(void) { armed = 0; return num_seen; }
void gare_note(const char *text) {
    pthread_mutex_lock(&turn);
    if (armed) note('A', text, "", 0, "", 0);
    pthread_mutex_unlock(&turn);
}

/* --- data ------------------------------------------------------------------------------------------------------ */

static int is_watched_file(int fd, char *path) {
    return armed && root_length && fd > 2 && fd != trace && fd_path(fd, path) && is_below(path);
}

static int is_watched_socket(int fd, const char *data, size_t size) {
    struct sockaddr_in peer;
    socklen_t length = sizeof peer;
    if (!armed || !watched_port || fd < 0 || fd >= MAX_FDS) return 0;
    if (getpeername(fd, (struct sockaddr *)&peer, &length) || peer.sin_family != AF_INET) return 0;
    if (ntohs(peer.sin_port) != watched_port) return 0;
    if (!only_requests) return 1;
    if ((size > 4 && !memcmp(data, "PUT ", 4)) || (size > 5 && !memcmp(data, "POST ", 5)) ||
        (size > 7 && !memcmp(data, "DELETE ", 7)))
        is_request[fd] = 1;
    else if ((size > 4 && !memcmp(data, "GET ", 4)) || (size > 5 && !memcmp(data, "HEAD ", 5)))
        is_request[fd] = 0;
    return is_request[fd];
}

static ssize_t raw_write(int fd, const void *data, size_t size, int64_t offset) {
    return offset < 0 ? syscall(SYS_write, fd, data, size) : syscall(SYS_pwrite64, fd, data, size, offset);
}

static ssize_t write_file(int fd, const char *path, const void *data, size_t size, int64_t offset) {
    pthread_mutex_lock(&turn);
    int stops = counted();
    int64_t at = offset;
    if (at < 0) {
        struct stat about;
        at = lseek(fd, 0, SEEK_CUR);
        if ((fcntl(fd, F_GETFL) & O_APPEND) && !fstat(fd, &about)) at = about.st_size;
    }
    if (stops && mode == TORN) size /= 2;
    ssize_t done = size ? raw_write(fd, data, size, offset) : 0;
    int problem = errno;
    note(done > 0 ? 'W' : 'N', path, "", at, data, done > 0 ? done : 0);
    if (stops) die();
    pthread_mutex_unlock(&turn);
    errno = problem;
    return done;
}

static ssize_t send_some(int fd, const void *data, size_t size, int flags) {
    pthread_mutex_lock(&turn);
    int stops = counted();
    if (stops && mode == TORN) size /= 2;
    ssize_t done = size ? syscall(SYS_sendto, fd, data, size, flags, NULL, 0) : 0;
    int problem = errno;
    note(done > 0 ? 'S' : 'N', "", "", 0, data, done > 0 ? done : 0);
    if (stops && mode == CUT) { /* the server answers, and the answer is lost */
        struct pollfd one = {fd, POLLIN, 0};
        char lost[65536];
        if (poll(&one, 1, 300) > 0)
            while (syscall(SYS_recvfrom, fd, lost, sizeof lost, MSG_DONTWAIT, NULL, NULL) > 0) {}
        shutdown(fd, SHUT_RDWR);
    } else if (stops) {
        die();
    }
    pthread_mutex_unlock(&turn);
    errno = problem;
    return done;
}

ssize_t write(int fd, const void *data, size_t size) {
    char path[PATH_MAX];
    if (is_watched_file(fd, path)) return write_file(fd, path, data, size, -1);
    if (is_watched_socket(fd, data, size)) return send_some(fd, data, size, MSG_NOSIGNAL);
    return syscall(SYS_write, fd, data, size);
}

static ssize_t positioned(int fd, const void *data, size_t size, off_t offset) {
    char path[PATH_MAX];
    if (is_watched_file(fd, path)) return write_file(fd, path, data, size, offset);
    return syscall(SYS_pwrite64, fd, data, size, offset);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) { return positioned(fd, data, size, offset); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) { return positioned(fd, data, size, offset); }

static char *joined(const struct iovec *parts, int count, size_t *size) {
    *size = 0;
    for (int i = 0; i < count; i++) *size += parts[i].iov_len;
    char *all = malloc(*size + 1), *at = all;
    for (int i = 0; i < count; i++) memcpy(at, parts[i].iov_base, parts[i].iov_len), at += parts[i].iov_len;
    return all;
}

ssize_t writev(int fd, const struct iovec *parts, int count) {
    char path[PATH_MAX];
    int is_file = is_watched_file(fd, path);
    const char *first = count ? parts[0].iov_base : "";
    size_t first_size = count ? parts[0].iov_len : 0;
    if (!is_file && !is_watched_socket(fd, first, first_size)) return REAL(writev)(fd, parts, count);
    size_t size;
    char *all = joined(parts, count, &size);
    ssize_t done = is_file ? write_file(fd, path, all, size, -1) : send_some(fd, all, size, MSG_NOSIGNAL);
    free(all);
    return done;
}

ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    char path[PATH_MAX];
    if (is_watched_file(fd, path)) complain("pwritev", path);
    return REAL(pwritev)(fd, parts, count, offset);
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) { return pwritev(fd, parts, count, offset); }

ssize_t send(int fd, const void *data, size_t size, int flags) {
    if (is_watched_socket(fd, data, size)) return send_some(fd, data, size, flags);
    return syscall(SYS_sendto, fd, data, size, flags, NULL, 0);
}

ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *to, socklen_t length) {
    if (!to && is_watched_socket(fd, data, size)) return send_some(fd, data, size, flags);
    return syscall(SYS_sendto, fd, data, size, flags, to, length);
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    if (message->msg_iovlen && is_watched_socket(fd, message->msg_iov[0].iov_base, message->msg_iov[0].iov_len)) {
        size_t size;
        char *all = joined(message->msg_iov, message->msg_iovlen, &size);
        ssize_t done = send_some(fd, all, size, flags);
        free(all);
        return done;
    }
    return syscall(SYS_sendmsg, fd, message, flags);
}

ssize_t copy_file_range(int from, off64_t *in, int to, off64_t *out, size_t size, unsigned flags) {
    char path[PATH_MAX];
    if (is_watched_file(to, path)) { errno = ENOSYS; return -1; } /* callers then read and write */
    return REAL(copy_file_range)(from, in, to, out, size, flags);
}

ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    char path[PATH_MAX];
    if (is_watched_file(to, path)) { errno = ENOSYS; return -1; }
    return syscall(SYS_sendfile, to, from, offset, size);
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) { return sendfile(to, from, offset, size); }

static int resize(int fd, off_t size) {
    char path[PATH_MAX];
    struct stat about;
    if (!is_watched_file(fd, path) || (!fstat(fd, &about) && about.st_size == size)) return syscall(SYS_ftruncate, fd, size);
    pthread_mutex_lock(&turn);
    int stops = counted();
    int result = syscall(SYS_ftruncate, fd, size);
    note(result ? 'N' : 'T', path, "", size, "", 0);
    if (stops) die();
    pthread_mutex_unlock(&turn);
    return result;
}
int ftruncate(int fd, off_t size) { return resize(fd, size); }
int ftruncate64(int fd, off64_t size) { return resize(fd, size); }

static int allocate(int fd) {
    char path[PATH_MAX];
    if (is_watched_file(fd, path)) complain("fallocate", path);
    return 0;
}
int posix_fallocate(int fd, off_t offset, off_t size) { allocate(fd); return REAL(posix_fallocate)(fd, offset, size); }
int posix_fallocate64(int fd, off64_t offset, off64_t size) { return posix_fallocate(fd, offset, size); }
int fallocate(int fd, int how, off_t offset, off_t size) { allocate(fd); return syscall(SYS_fallocate, fd, how, offset, size); }
int fallocate64(int fd, int how, off64_t offset, off64_t size) { return fallocate(fd, how, offset, size); }

static void *map(void *at, size_t size, int access, int flags, int fd, off_t offset) {
    char path[PATH_MAX];
    if ((access & PROT_WRITE) && (flags & 0x0f) != MAP_PRIVATE && is_watched_file(fd, path)) complain("mmap", path);
    return (void *)syscall(SYS_mmap, at, size, access, flags, fd, offset);
}
void *mmap(void *at, size_t size, int access, int flags, int fd, off_t offset) { return map(at, size, access, flags, fd, offset); }
void *mmap64(void *at, size_t size, int access, int flags, int fd, off64_t offset) { return map(at, size, access, flags, fd, offset); }

/* --- flushing: no write, but the trace of a power cut needs it -------------------------------------------------- */

static int flush(int fd, long call) {
    char path[PATH_MAX];
    int is_ours = is_watched_file(fd, path);
    if (is_ours) pthread_mutex_lock(&turn);
    int result = syscall(call, fd);
    if (is_ours) {
        if (!result) note('F', path, "", 0, "", 0);
        pthread_mutex_unlock(&turn);
    }
    return result;
}
int fsync(int fd) { return flush(fd, SYS_fsync); }
int fdatasync(int fd) { return flush(fd, SYS_fdatasync); }

/* --- names ----------------------------------------------------------------------------------------------------- */

static int has_parent(const char *path) {
    char parent[PATH_MAX];
    snprintf(parent, sizeof parent, "%s", path);
    char *end = strrchr(parent, '/');
    if (end) *end = 0;
    return !access(parent, F_OK);
}

static int open_file(int folder, const char *name, int flags, mode_t rights) {
    char path[PATH_MAX];
    if (!armed || !(flags & (O_CREAT | O_TRUNC)) || !full_path(folder, name, path) || !is_below(path))
        return syscall(SYS_openat, folder, name, flags, rights);
    struct stat about;
    int is_there = !stat(path, &about);
    if (!is_there && !(has_parent(path) && (flags & O_CREAT))) return syscall(SYS_openat, folder, name, flags, rights);
    if (is_there && (flags & O_EXCL)) return syscall(SYS_openat, folder, name, flags, rights);
    if (is_there && !((flags & O_TRUNC) && about.st_size)) return syscall(SYS_openat, folder, name, flags, rights);
    pthread_mutex_lock(&turn);
    int stops = counted();
    int result = syscall(SYS_openat, folder, name, flags, rights);
    int problem = errno;
    note(result < 0 ? 'N' : is_there ? 'T' : 'C', path, "", 0, "", 0);
    if (stops) die();
    pthread_mutex_unlock(&turn);
    errno = problem;
    return result;
}
#define RIGHTS                                          \
    mode_t rights = 0;                                  \
    if (flags & (O_CREAT | O_TMPFILE)) {                \
        va_list rest;                                   \
        va_start(rest, flags);                          \
        rights = va_arg(rest, mode_t);                  \
        va_end(rest);                                   \
    }
int open(const char *name, int flags, ...) { RIGHTS return open_file(AT_FDCWD, name, flags, rights); }
int open64(const char *name, int flags, ...) { RIGHTS return open_file(AT_FDCWD, name, flags, rights); }
int openat(int folder, const char *name, int flags, ...) { RIGHTS return open_file(folder, name, flags, rights); }
int openat64(int folder, const char *name, int flags, ...) { RIGHTS return open_file(folder, name, flags, rights); }
int creat(const char *name, mode_t rights) { return open_file(AT_FDCWD, name, O_CREAT | O_WRONLY | O_TRUNC, rights); }
int creat64(const char *name, mode_t rights) { return creat(name, rights); }

static int one_name(char kind, int folder, const char *name, long call, long a, long b, long c) {
    char path[PATH_MAX];
    if (!armed || !full_path(folder, name, path) || !is_below(path)) return syscall(call, a, b, c);
    struct stat about;
    int is_there = !lstat(path, &about); /* what cannot succeed is no write */
    if (kind == 'M' ? is_there || !has_parent(path) : !is_there) return syscall(call, a, b, c);
    BEGIN_NAME(kind, path, "");
    int result = syscall(call, a, b, c);
    int problem = errno;
    END_NAME(kind, path, "");
    errno = problem;
    return result;
}
int mkdir(const char *name, mode_t rights) {
    return one_name('M', AT_FDCWD, name, SYS_mkdirat, AT_FDCWD, (long)name, rights);
}
int mkdirat(int folder, const char *name, mode_t rights) {
    return one_name('M', folder, name, SYS_mkdirat, folder, (long)name, rights);
}
int unlink(const char *name) { return one_name('U', AT_FDCWD, name, SYS_unlinkat, AT_FDCWD, (long)name, 0); }
int rmdir(const char *name) { return one_name('D', AT_FDCWD, name, SYS_unlinkat, AT_FDCWD, (long)name, AT_REMOVEDIR); }
int unlinkat(int folder, const char *name, int flags) {
    return one_name(flags & AT_REMOVEDIR ? 'D' : 'U', folder, name, SYS_unlinkat, folder, (long)name, flags);
}

static int two_names(char kind, int folder, const char *name, int other, const char *target, long call, long last) {
    char path[PATH_MAX], path2[PATH_MAX];
    if (!armed || !full_path(folder, name, path) || !full_path(other, target, path2) || !(is_below(path) || is_below(path2)))
        return syscall(call, folder, name, other, target, last);
    BEGIN_NAME(kind, path, path2);
    int result = syscall(call, folder, name, other, target, last);
    int problem = errno;
    END_NAME(kind, path, path2);
    errno = problem;
    return result;
}
int rename(const char *a, const char *b) { return two_names('R', AT_FDCWD, a, AT_FDCWD, b, SYS_renameat2, 0); }
int renameat(int f, const char *a, int g, const char *b) { return two_names('R', f, a, g, b, SYS_renameat2, 0); }
int renameat2(int f, const char *a, int g, const char *b, unsigned flags) {
    return two_names(flags & 2 ? 'X' : 'R', f, a, g, b, SYS_renameat2, flags);
}
int link(const char *a, const char *b) { return two_names('L', AT_FDCWD, a, AT_FDCWD, b, SYS_linkat, 0); }
int linkat(int f, const char *a, int g, const char *b, int flags) { return two_names('L', f, a, g, b, SYS_linkat, flags); }
int symlink(const char *target, const char *name) {
    char path[PATH_MAX];
    if (armed && full_path(AT_FDCWD, name, path) && is_below(path)) complain("symlink", path);
    return syscall(SYS_symlinkat, target, AT_FDCWD, name);
}

/* --- calls that do not go through libc -------------------------------------------------------------------------- */

static void on_call(int signal, siginfo_t *about, void *context) {
    (void)signal;
    greg_t *at = ((ucontext_t *)context)->uc_mcontext.gregs;
    long a = at[REG_RDI], b = at[REG_RSI], c = at[REG_RDX], d = at[REG_R10], e = at[REG_R8];
    int before = errno;
    long result = -1;
    errno = ENOSYS;
    switch (about->si_syscall) {
    case SYS_rename: result = rename((char *)a, (char *)b); break;
    case SYS_renameat: result = renameat(a, (char *)b, c, (char *)d); break;
    case SYS_renameat2: result = renameat2(a, (char *)b, c, (char *)d, e); break;
    case SYS_link: result = link((char *)a, (char *)b); break;
    case SYS_linkat: result = linkat(a, (char *)b, c, (char *)d, e); break;
    case SYS_unlink: result = unlink((char *)a); break;
    case SYS_unlinkat: result = unlinkat(a, (char *)b, c); break;
    case SYS_rmdir: result = rmdir((char *)a); break;
    case SYS_mkdir: result = mkdir((char *)a, b); break;
    case SYS_mkdirat: result = mkdirat(a, (char *)b, c); break;
    case SYS_ftruncate: result = ftruncate(a, b); break;
    case SYS_truncate: complain("truncate", (char *)a); break;
    case SYS_pwrite64: result = pwrite(a, (void *)b, c, d); break;
    case SYS_fsync: result = fsync(a); break;
    case SYS_fdatasync: result = fdatasync(a); break;
    }
    at[REG_RAX] = result < 0 ? -errno : result;
    errno = before;
}

static int catch_all(void) {
    static const int calls[] = {SYS_rename, SYS_renameat, SYS_renameat2, SYS_link,     SYS_linkat,
                                SYS_unlink, SYS_unlinkat, SYS_rmdir,     SYS_mkdir,    SYS_mkdirat,
                                SYS_ftruncate, SYS_truncate, SYS_pwrite64, SYS_fsync, SYS_fdatasync};
    enum { NUM = sizeof calls / sizeof *calls };
    struct sock_filter code[NUM + 7];
    uint64_t here = (uintptr_t)gare_after;
    int n = 0;
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer));
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)here, 0, 2);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, instruction_pointer) + 4);
    code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, (uint32_t)(here >> 32), NUM + 1, 0);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr));
    for (int i = 0; i < NUM; i++)
        code[n++] = (struct sock_filter)BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, calls[i], NUM - i, 0);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW);
    code[n++] = (struct sock_filter)BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_TRAP);
    struct sock_fprog program = {n, code};
    struct sigaction action = {0};
    action.sa_sigaction = on_call;
    action.sa_flags = SA_SIGINFO | SA_NODEFER | SA_RESTART;
    if (sigaction(SIGSYS, &action, NULL)) return -1;
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)) return -1;
    return prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0);
}
