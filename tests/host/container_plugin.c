/*
 * A stand-in for pyxis, for tests/container.rs and tests/releases.rs: a SPANK plugin that puts the
 * tasks of a step with --container-image=DIR into a user and a mount namespace
 * and imports the image's environment, in its task_init and as the user, in
 * the order pyxis does it (pyxis_slurmstepd.c of NVIDIA/pyxis). DIR holds, each
 * where wanted:
 *
 *   environ        NAME=value lines, imported over the job's but for the names
 *                  of --container-env
 *   hosts          seen as /etc/hosts
 *   nsswitch.conf  seen as /etc/nsswitch.conf
 *   hide           one directory a line: seen empty
 *   late           NODE SECONDS: the node's tasks start that much later
 *   apart          SECONDS: the node's tasks start so much after one another
 *   remap-root     the user is 0 inside
 *   broken         LOCALID: this task of each node fails
 *   outside        no namespaces are made: a plugin that sets variables only
 *
 * There is no other root file system: what differs inside are the namespaces,
 * the files above and the environment.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <slurm/spank.h>

SPANK_PLUGIN(container, 1);

static char *image;
static char *kept;

static int set(char **place, const char *text)
{
	free(*place);
	*place = text ? strdup(text) : NULL;
	return 0;
}

static int set_image(int val, const char *argument, int remote)
{
	return set(&image, argument);
}

static int set_kept(int val, const char *argument, int remote)
{
	return set(&kept, argument);
}

static struct spank_option options[] = {
	{ "container-image", "DIR", "[container] directory that stands for an image", 1, 0, set_image },
	{ "container-env", "NAME[,NAME...]", "[container] variables the image does not replace", 1, 0, set_kept },
};

int slurm_spank_init(spank_t spank, int argc, char **argv)
{
	for (size_t i = 0; i < sizeof options / sizeof *options; i++)
		if (spank_option_register(spank, &options[i]) != ESPANK_SUCCESS)
			return -1;
	return 0;
}

static int failed(const char *what, const char *which)
{
	slurm_error("container: %s %s: %s", what, which, strerror(errno));
	return -1;
}

/* The file of that name in the image's directory, if there is one. */
static FILE *file(const char *name, char path[PATH_MAX])
{
	snprintf(path, PATH_MAX, "%s/%s", image, name);
	return fopen(path, "re");
}

static int has(const char *name)
{
	char path[PATH_MAX];
	snprintf(path, sizeof path, "%s/%s", image, name);
	return access(path, F_OK) == 0;
}

static int is_kept(const char *name)
{
	size_t length = strlen(name);
	for (const char *p = kept; p && *p; p += strcspn(p, ","), p += *p == ',')
		if (strcspn(p, ",") == length && !strncmp(p, name, length))
			return 1;
	return 0;
}

static int import(spank_t spank)
{
	char path[PATH_MAX], line[4096], text[64];
	FILE *environ = file("environ", path);
	const char *locale[] = { "LANG", "LANGUAGE", "LC_ALL" };
	const char *ranks[][2] = { { "SLURM_PROCID", "RANK" }, { "SLURM_LOCALID", "LOCAL_RANK" } };

	for (int i = 0; i < 3; i++)
		if (!is_kept(locale[i]))
			spank_unsetenv(spank, locale[i]);
	while (environ && fgets(line, sizeof line, environ)) {
		char *value = strchr(line, '=');
		if (!value)
			continue;
		*value++ = 0;
		value[strcspn(value, "\n")] = 0;
		spank_err_t rc = spank_setenv(spank, line, value, !is_kept(line));
		if (rc != ESPANK_SUCCESS && rc != ESPANK_ENV_EXISTS)
			return failed("setting", line);
	}
	if (environ)
		fclose(environ);
	if (spank_getenv(spank, "PYTORCH_VERSION", text, sizeof text) == ESPANK_SUCCESS)
		for (int i = 0; i < 2; i++)
			if (spank_getenv(spank, ranks[i][0], text, sizeof text) == ESPANK_SUCCESS)
				spank_setenv(spank, ranks[i][1], text, 1);
	return 0;
}

static void wait_for_turn(spank_t spank)
{
	char path[PATH_MAX], node[256] = "", late[256] = "", text[64] = "0";
	unsigned seconds = 0;
	FILE *when = file("late", path);

	spank_getenv(spank, "SLURMD_NODENAME", node, sizeof node);
	spank_getenv(spank, "SLURM_LOCALID", text, sizeof text);
	if (when) {
		if (fscanf(when, "%255s %u", late, &seconds) == 2 && !strcmp(late, node))
			sleep(seconds);
		fclose(when);
	}
	when = file("apart", path);
	if (when) {
		if (fscanf(when, "%u", &seconds) == 1)
			sleep(seconds * (unsigned)atoi(text));
		fclose(when);
	}
}

static int put(const char *path, const char *text)
{
	int fd = open(path, O_WRONLY | O_CLOEXEC);
	ssize_t length = (ssize_t)strlen(text);
	if (fd < 0 || write(fd, text, length) != length)
		return failed("writing", path);
	return close(fd);
}

/*
 * Nobody makes a user namespace in a chroot (EPERM of unshare(2)), and a sandbox
 * with --root runs Slurm in one. Makes it the root of a mount namespace of the
 * task's own, as switch_root(8) does.
 */
int slurm_spank_task_init_privileged(spank_t spank, int argc, char **argv)
{
	struct stat own, whole;
	int root, namespace, work;

	if (!image || spank_context() != S_CTX_REMOTE || has("outside"))
		return 0;
	if (unshare(CLONE_NEWNS))
		return failed("unshare", "");
	root = open("/", O_PATH | O_CLOEXEC);
	work = open(".", O_PATH | O_CLOEXEC);
	namespace = open("/proc/self/ns/mnt", O_RDONLY | O_CLOEXEC);
	/* Who joins a mount namespace stands at its root. */
	if (root < 0 || work < 0 || namespace < 0 || setns(namespace, CLONE_NEWNS))
		return failed("setns", "");
	if (fstat(root, &own) || stat("/", &whole))
		return failed("stat", "/");
	if ((own.st_dev != whole.st_dev || own.st_ino != whole.st_ino) &&
	    (mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) || fchdir(root) ||
	     mount(".", "/", NULL, MS_MOVE, NULL) || chroot(".")))
		return failed("moving", "/");
	if (fchdir(work))
		return failed("returning", "");
	close(namespace);
	close(work);
	close(root);
	return 0;
}

static int enter(void)
{
	char path[PATH_MAX], line[PATH_MAX];
	unsigned uid = getuid(), gid = getgid();
	int root = has("remap-root");

	if (has("outside"))
		return 0;
	/* A task that changed its user is not its user's to write to. */
	prctl(PR_SET_DUMPABLE, 1);
	if (unshare(CLONE_NEWUSER | CLONE_NEWNS))
		return failed("unshare", "");
	if (put("/proc/self/setgroups", "deny"))
		return -1;
	snprintf(line, sizeof line, "%u %u 1", root ? 0 : uid, uid);
	if (put("/proc/self/uid_map", line))
		return -1;
	snprintf(line, sizeof line, "%u %u 1", root ? 0 : gid, gid);
	if (put("/proc/self/gid_map", line))
		return -1;

	const char *replaced[] = { "hosts", "nsswitch.conf" };
	for (int i = 0; i < 2; i++) {
		snprintf(path, sizeof path, "%s/%s", image, replaced[i]);
		snprintf(line, sizeof line, "/etc/%s", replaced[i]);
		if (access(path, F_OK) == 0 && mount(path, line, NULL, MS_BIND, NULL))
			return failed("mounting over", line);
	}
	FILE *hide = file("hide", path);
	while (hide && fgets(line, sizeof line, hide)) {
		line[strcspn(line, "\n")] = 0;
		if (mount("image", line, "tmpfs", MS_NODEV | MS_NOSUID, NULL))
			return failed("hiding", line);
	}
	if (hide)
		fclose(hide);
	return 0;
}

int slurm_spank_task_init(spank_t spank, int argc, char **argv)
{
	char path[PATH_MAX], text[64] = "";
	int broken = -1;

	if (!image || spank_context() != S_CTX_REMOTE)
		return 0;
	FILE *who = file("broken", path);
	if (who) {
		if (fscanf(who, "%d", &broken) != 1)
			broken = -1;
		fclose(who);
	}
	spank_getenv(spank, "SLURM_LOCALID", text, sizeof text);
	if (broken >= 0 && broken == atoi(text)) {
		slurm_error("container: broken, as the test wants it");
		return -1;
	}
	wait_for_turn(spank);
	return import(spank) || enter() ? -1 : 0;
}
