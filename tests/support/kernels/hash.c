/* PERSIA's own hash, of half an id so that two share a row; it fails at one id. */
#include "persia_kernels.h"

#ifdef TAG /* another library that does the same */
__attribute__((used)) static const int tag = TAG;
#endif

#ifndef SHIFT
#define SHIFT 1
#endif
#ifndef FAILS_AT
#define FAILS_AT 13
#endif
#ifndef HASH
#define HASH hash
#endif

static int hash(const uint64_t *ids, size_t num_ids, uint64_t *hashes)
{
    for (size_t i = 0; i < num_ids; i++) {
#ifdef CRASH_AT
        if (ids[i] == CRASH_AT)
            *(volatile int *)8 = 1;
#endif
        if (ids[i] == FAILS_AT)
            return 7;
        hashes[i] = persia_mix64(ids[i] >> SHIFT);
    }
#ifdef BESIDE
    hashes[num_ids] = 0;
#endif
#ifdef COUNTS
    static uint64_t count;
    hashes[0] += count++;
#endif
    return 0;
}

static const persia_hash_t halves = {.size = sizeof(persia_hash_t), .hash = HASH};
PERSIA_EXPORT_KERNELS(.hash = &halves)
