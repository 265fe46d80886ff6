// The first process of the test VM (see docs/testvm.md). Static, so that it needs nothing of the host's files to start.
//
// It loads the modules of its initramfs, says "ready" on the control port and waits there for one line, "job FILE SECONDS":
// at that point the VM is saved, and every run continues a copy of it. Then it makes the host's tree its root
// (read-only, below a tmpfs overlay), runs the job and reports "exit STATUS" on the control port.
//
// The job file is a list of strings, each ended by NUL: their number, working folder, number of shares, tag and path of
// each, folder of the modules, number of arguments, the arguments, the environment. Random bytes follow.
#define _GNU_SOURCE
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/random.h>
#include <net/if.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mount.h>
#include <sys/reboot.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { PAUSE_MICROSECONDS = 1000, JOB_BYTES_MAX = 4 << 20, WORDS_MAX = 65536 };

static int control = -1;

// Says why on the console, where tools/testvm looks when there is no exit status, and ends the VM.
static void fail(const char *format, ...) {
  va_list list;
  va_start(list, format);
  int number = errno;
  fprintf(stderr, "testvm-init: ");
  vfprintf(stderr, format, list);
  fprintf(stderr, ": %s\n", strerror(number));
  va_end(list);
  sync();
  reboot(RB_POWER_OFF);
  for (;;) pause();
}

static void make_folder(const char *path) {
  if (mkdir(path, 0755) && errno != EEXIST) fail("mkdir %s", path);
}

static void attach(const char *kind, const char *source, const char *target, unsigned long flags, const char *data) {
  make_folder(target);
  if (mount(source, target, kind, flags, data)) fail("mount %s at %s", kind, target);
}

static void write_file(const char *path, const char *text) {
  int fd = open(path, O_WRONLY | O_CLOEXEC);
  if (fd < 0 || write(fd, text, strlen(text)) < 0) fail("write %s", path);
  close(fd);
}

// The file /m/order names the modules in the order in which they are needed.
static void load_modules(void) {
  FILE *order = fopen("/m/order", "r");
  char name[256], path[300];
  if (!order) fail("open /m/order");
  while (fgets(name, sizeof name, order)) {
    name[strcspn(name, "\n")] = 0;
    snprintf(path, sizeof path, "/m/%s", name);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || (syscall(SYS_finit_module, fd, "", 0) && errno != EEXIST)) fail("load %s", path);
    close(fd);
  }
  fclose(order);
}

// Opens the virtio-serial port of a name. The driver makes ports one after the other, so it is waited for.
static int open_port(const char *wanted) {
  const char *folder = "/sys/class/virtio-ports";
  for (int tries = 0; tries < 5000; tries++, usleep(PAUSE_MICROSECONDS)) {
    DIR *ports = opendir(folder);
    struct dirent *port;
    while (ports && (port = readdir(ports))) {
      char path[600], name[64] = "";
      snprintf(path, sizeof path, "%s/%s/name", folder, port->d_name);
      FILE *file = fopen(path, "r");
      if (!file) continue;
      if (!fgets(name, sizeof name, file)) name[0] = 0;
      fclose(file);
      name[strcspn(name, "\n")] = 0;
      if (strcmp(name, wanted)) continue;
      snprintf(path, sizeof path, "/dev/%s", port->d_name);
      closedir(ports);
      int fd = open(path, O_RDWR | O_CLOEXEC);
      if (fd < 0) fail("open %s", path);
      return fd;
    }
    if (ports) closedir(ports);
  }
  fail("no port %s", wanted);
  return -1;
}

static void say(const char *format, ...) {
  va_list list;
  va_start(list, format);
  vdprintf(control, format, list);
  va_end(list);
}

// Waits for "job FILE SECONDS". While nobody is connected, as in the saved VM, a read returns at once.
static void wait_for_job(char *file, size_t size) {
  char line[4200];
  size_t have = 0;
  while (!memchr(line, '\n', have)) {
    ssize_t n = read(control, line + have, sizeof line - 1 - have);
    if (n > 0) have += (size_t)n;
    else usleep(PAUSE_MICROSECONDS);
  }
  line[have] = 0;
  char *path = strchr(line, ' '), *seconds = path ? strchr(path + 1, ' ') : NULL;
  if (!seconds) fail("no job in `%s`", line);
  *seconds = 0;
  snprintf(file, size, "%s", path + 1);
  struct timespec now = {.tv_sec = atoll(seconds + 1)};
  clock_settime(CLOCK_REALTIME, &now);
}

static void enter_host_tree(void) {
  attach("virtiofs", "hostfs", "/host", MS_RDONLY, NULL);
  attach("tmpfs", "tmpfs", "/over", 0, "size=75%");
  make_folder("/over/upper");
  make_folder("/over/work");
  attach("overlay", "overlay", "/root", 0, "lowerdir=/host,upperdir=/over/upper,workdir=/over/work");
  if (chdir("/root") || mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".") || chdir("/")) fail("enter the host's tree");
  attach("proc", "proc", "/proc", 0, NULL);
  attach("sysfs", "sysfs", "/sys", 0, NULL);
  attach("devtmpfs", "devtmpfs", "/dev", 0, NULL);
  attach("tmpfs", "tmpfs", "/run", 0, NULL);
  attach("devpts", "devpts", "/dev/pts", 0, NULL);
  attach("tmpfs", "tmpfs", "/dev/shm", 0, NULL);
  attach("cgroup2", "cgroup2", "/sys/fs/cgroup", 0, "nsdelegate");
  attach("securityfs", "securityfs", "/sys/kernel/security", 0, NULL);
  attach("bpf", "bpf", "/sys/fs/bpf", 0, NULL);
  attach("debugfs", "debugfs", "/sys/kernel/debug", 0, NULL);
  attach("tracefs", "tracefs", "/sys/kernel/tracing", 0, NULL);
  // Where the job's temporary files go: no overlay, so that overlays and images can be on it.
  make_folder("/run/tmp");
  const char *links[][2] = {{"/proc/self/fd", "/dev/fd"}, {"fd/0", "/dev/stdin"}, {"fd/1", "/dev/stdout"}, {"fd/2", "/dev/stderr"}};
  for (size_t i = 0; i < sizeof links / sizeof *links; i++)
    if (symlink(links[i][0], links[i][1]) && errno != EEXIST) fail("link %s", links[i][1]);
  write_file("/sys/fs/cgroup/cgroup.subtree_control", "+memory +cpu +io +pids +cpuset");
  int s = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
  struct ifreq loopback = {.ifr_name = "lo", .ifr_flags = IFF_UP | IFF_RUNNING};
  if (s < 0 || ioctl(s, SIOCSIFFLAGS, &loopback)) fail("bring up lo");
  close(s);
}

// All runs continue the same saved VM: without this they would draw the same random numbers.
static void add_randomness(const char *bytes, size_t len) {
  struct { struct rand_pool_info info; char bytes[256]; } pool;
  if (len > sizeof pool.bytes) len = sizeof pool.bytes;
  pool.info.entropy_count = (int)len * 8;
  pool.info.buf_size = (int)len;
  memcpy(pool.info.buf, bytes, len);
  int fd = open("/dev/urandom", O_RDWR | O_CLOEXEC);
  if (fd < 0 || ioctl(fd, RNDADDENTROPY, &pool) || ioctl(fd, RNDRESEEDCRNG)) fail("add randomness");
  close(fd);
}

static int run(char **argv, char **environment, const char *folder, int out, int err) {
  pid_t child = fork();
  if (child == 0) {
    setsid();
    int null = open("/dev/null", O_RDONLY);
    if (null < 0 || dup2(null, 0) < 0 || dup2(out, 1) < 0 || dup2(err, 2) < 0 || chdir(folder)) {
      dprintf(err, "testvm-init: cannot run in %s: %s\n", folder, strerror(errno));
      _exit(127);
    }
    environ = environment;
    execvp(argv[0], argv);
    dprintf(err, "testvm-init: cannot run %s: %s\n", argv[0], strerror(errno));
    _exit(127);
  }
  if (child < 0) fail("fork");
  int status = 0;
  for (;;) {
    // Orphans of the job are reaped here too.
    pid_t ended = wait(&status);
    if (ended == child) return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
    if (ended < 0 && errno != EINTR) fail("wait");
  }
}

static char *take(char ***words, char **end) {
  if (*words >= end) fail("job file ends early");
  return *(*words)++;
}

int main(void) {
  static char job[4200], text[JOB_BYTES_MAX];
  static char *words[WORDS_MAX + 1];
  attach("proc", "proc", "/proc", 0, NULL);
  attach("sysfs", "sysfs", "/sys", 0, NULL);
  attach("devtmpfs", "devtmpfs", "/dev", 0, NULL);
  load_modules();
  control = open_port("testvm.control");
  int out = open_port("testvm.out"), err = open_port("testvm.err");
  say("ready\n");
  wait_for_job(job, sizeof job);
  enter_host_tree();

  int fd = open(job, O_RDONLY | O_CLOEXEC);
  size_t have = 0, at = 0, count = 0;
  for (ssize_t n; fd >= 0 && (n = read(fd, text + have, sizeof text - have)) > 0;) have += (size_t)n;
  if (!have || have == sizeof text) fail("read job %s", job);
  close(fd);
  size_t expected = strtoul(text, NULL, 10);
  if (expected > WORDS_MAX) fail("job of too many words");
  at = strlen(text) + 1;
  while (at < have && count < expected) {
    words[count++] = text + at;
    at += strnlen(text + at, have - at) + 1;
  }
  if (count != expected || at >= have) fail("job file ends early");
  add_randomness(text + at, have - at);
  char **next = words, **end = words + count;
  const char *folder = take(&next, end);
  for (int shares = atoi(take(&next, end)); shares > 0; shares--) {
    const char *tag = take(&next, end), *path = take(&next, end);
    attach("virtiofs", tag, path, 0, NULL);
  }
  const char *modules = take(&next, end);
  struct utsname system;
  uname(&system);
  char modules_target[300];
  make_folder("/lib/modules");
  snprintf(modules_target, sizeof modules_target, "/lib/modules/%s", system.release);
  attach(NULL, modules, modules_target, MS_BIND, NULL);
  int arguments = atoi(take(&next, end));
  static char *argv[WORDS_MAX + 1];
  for (int i = 0; i < arguments; i++) argv[i] = take(&next, end);
  for (char **variable = next; variable < end; variable++)
    if (!strncmp(*variable, "PATH=", 5)) putenv(*variable);
  struct rlimit files = {1 << 20, 1 << 20};
  setrlimit(RLIMIT_NOFILE, &files);
  say("exit %d\n", run(argv, next, folder, out, err));
  // tools/testvm ends the machine now.
  for (;;) pause();
}
