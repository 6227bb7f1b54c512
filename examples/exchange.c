/* An id from rank 0 to all ranks, as an NCCL program needs it for ncclCommInitRank.
 *
 *   cc -o exchange exchange.c -lpalingenesis
 *   srun -N2 --ntasks-per-node=2 --palingenesis=store ./exchange
 */
#include <palingenesis.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int main(void) {
    /* In its place: ncclUniqueId id; on rank 0 filled by ncclGetUniqueId(&id). */
    unsigned char id[128] = {0};
    const char *rank = getenv("RANK");
    char *text = NULL;

    if (rank != NULL && strcmp(rank, "0") == 0) {
        snprintf((char *)id, sizeof id, "made by rank 0");
    }
    if (palingenesis_exchange_id(id, sizeof id, 60, &text) != 0) {
        fprintf(stderr, "rank %s: %s\n", rank != NULL ? rank : "?", text != NULL ? text : "wrong use");
        palingenesis_free(text);
        return 1;
    }
    printf("rank %s has the id %s\n", rank, (char *)id);

    /* Before the first thread: the CPUs and the memory beside this rank's GPU. The plugin
     * has done so already; a rank that it did not start does it here. */
    if (palingenesis_bind(&text) != 0) {
        fprintf(stderr, "rank %s: %s\n", rank, text);
    }
    palingenesis_free(text);
    return 0;
}
