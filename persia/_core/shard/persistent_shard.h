/* Memory that outlives a process: a file in a tmpfs, mapped.
 *
 * A killed process has made its stores in the order of its program, as far as anybody can see who
 * reads the pages afterwards: a kill takes effect between two instructions, and the pages are the
 * kernel's. That holds on x86-64 and on aarch64, whatever a second CPU would have seen meanwhile.
 * So only the compiler has to be kept from moving stores. (Power failure is another matter: a
 * tmpfs does not survive it.)
 */
#ifndef PERSIA_KEPT_H
#define PERSIA_KEPT_H

#include <stddef.h>
#include <stdint.h>
#include <sys/mman.h>
#include <unistd.h>

#include "portable.h"

#if defined(__linux__)
#include <errno.h>
#include <sys/syscall.h>
#define PERSIA_KEEP_SIZE 1
#define PERSIA_PUNCH_HOLE 2
#endif

static inline void persia_stores_before(void) { __asm__ volatile("" : : : "memory"); }

static inline void persia_die(void) { _exit(137); }

/* Bytes of a file at an address that is so aligned; NULL if they cannot be mapped. */
static inline void *persia_map_file(int file, uint64_t offset, size_t bytes, size_t alignment)
{
    char *start = (char *)persia_map(bytes, alignment);
    if (start == NULL)
        return NULL;
    if (mmap(start, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, file,
             (off_t)offset) == MAP_FAILED) {
        munmap(start, bytes);
        return NULL;
    }
    return start;
}

/* Have memory set aside for a part of the file; -1 if there is none. */
static inline int persia_back(int file, uint64_t offset, size_t bytes)
{
#if defined(__linux__)
    long done;
    do
        done = syscall(SYS_fallocate, file, PERSIA_KEEP_SIZE, (off_t)offset, (off_t)bytes);
    while (done != 0 && errno == EINTR);
    return done == 0 ? 0 : -1;
#else
    (void)file;
    (void)offset;
    (void)bytes;
    return -1;
#endif
}

/* Put the process's own zeroed memory in the place of a mapping; -1 if there is none. */
static inline int persia_detach(void *start, size_t bytes)
{
    return mmap(start, bytes, PROT_READ | PROT_WRITE,
                MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) == MAP_FAILED
               ? -1
               : 0;
}

static inline void persia_punch(int file, uint64_t offset, uint64_t bytes)
{
#if defined(__linux__)
    (void)!syscall(SYS_fallocate, file, PERSIA_KEEP_SIZE | PERSIA_PUNCH_HOLE, (off_t)offset,
                   (off_t)bytes);
#else
    (void)file;
    (void)offset;
    (void)bytes;
#endif
}

#endif
