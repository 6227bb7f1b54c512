/* The C interface of libpalingenesis. Link with -lpalingenesis.
 * SPDX-License-Identifier: Apache-2.0 */

#ifndef PALINGENESIS_H
#define PALINGENESIS_H

/* Made by cbindgen from src/capi.rs; do not edit. */

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
