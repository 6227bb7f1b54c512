/* The C interface of libpalingenesis. Link with -lpalingenesis.
 * SPDX-License-Identifier: Apache-2.0 */

#ifndef PALINGENESIS_H
#define PALINGENESIS_H

/* Made by cbindgen from src/capi.rs; do not edit. */

#include <stddef.h>

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/**
 * Writes the calling task's place in its step to `*json`, as a JSON object
 * with at least the keys job_id, step_id, shape, profile, fabric, nodes,
 * node_list, world_size, rank, local_rank, local_world_size, node_rank, node,
 * master_addr, master_port and ports. It is read from the task's environment;
 * the plugin need not be installed, but where it set MASTER_ADDR and
 * MASTER_PORT these are the ones. The command and the node's devices are not
 * looked at: shape is "native" and fabric "auto" where only these would tell.
 * master_addr and master_port are absent where shape is "shell".
 * The site file counts where it can be read; one that is broken or, as in most
 * containers, absent is no error here: this only tells what is.
 *
 * Returns 0, or -1 when there is no step or it makes no sense; `*json` is then
 * one line that says why. Either way `*json` must be given back to
 * palingenesis_free. Returns -2 and writes nothing when `json` is NULL.
 * Starts no thread and may be called from any; do not change the environment
 * meanwhile.
 *
 * # Safety
 * `json` is NULL or points to a writable pointer.
 */
int palingenesis_layout_json(char **json);

/**
 * Writes to `*json` what srun --palingenesis would give the calling task, as a
 * JSON object: step (as palingenesis_layout_json has it), variables with the
 * reason of each, binding, warnings and more, as `palingenesis explain --json`
 * prints it. Nothing is set, made or bound. What is secret is not shown.
 *
 * Returns and rules as for palingenesis_layout_json; -1 also where the step
 * would be refused.
 *
 * # Safety
 * `json` is NULL or points to a writable pointer.
 */
int palingenesis_plan_json(char **json);

/**
 * Binds the calling thread to the CPUs and the memory near the GPU of its rank,
 * as the plugin binds a task; threads that are made later inherit it, so call it
 * before there are others. What Slurm gave the task is narrowed, never widened,
 * and ranks do not exchange what they have, which only the plugin can let them
 * do. Under the plugin it finds all done and changes nothing.
 *
 * Returns 0 when everything is as planned, also where nothing is to be bound,
 * and `*text` is the reason of each part, one per line; 1 when the kernel
 * refused a part, and `*text` says which; -1 and -2 as for
 * palingenesis_layout_json. `*text` must be given back to palingenesis_free.
 *
 * # Safety
 * `text` is NULL or points to a writable pointer.
 */
int palingenesis_bind(char **text);

/**
 * Gives all ranks of the step rank 0's `length` bytes at `id`, such as an
 * ncclUniqueId: rank 0 brings them, on the others they are written. Every rank
 * must call it, with the same length (1 to 65536), equally often. The ranks meet
 * at MASTER_ADDR, where rank 0 listens on MASTER_PORT until all have come;
 * nothing else may listen there meanwhile. Who does not know
 * PALINGENESIS_STORE_KEY, 64 hexadecimal digits that are the same on all ranks,
 * gets nothing and gives nothing; srun --palingenesis=store sets it. The bytes
 * are not encrypted.
 *
 * Returns 0; or -1 when it failed, within about `timeout_seconds` on each rank,
 * and `*error`, where `error` is not NULL, is one line that names who did not
 * come and must be given back to palingenesis_free; -2 when `id` is NULL or
 * `length` is out of range. Waits in the calling thread, starts none, and keeps
 * no descriptor. Two threads of a process must not call it at once.
 *
 * # Safety
 * `id` is NULL or points to `length` bytes that may be written; `error` is NULL
 * or points to a writable pointer.
 */
int palingenesis_exchange_id(void *id, size_t length, unsigned int timeout_seconds, char **error);

/**
 * Frees a string that this library returned; NULL is allowed.
 *
 * # Safety
 * `text` is NULL or came from this library and was not freed before.
 */
void palingenesis_free(char *text);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* PALINGENESIS_H */
