/* What differs between platforms, in one place; every use has a fallback that is only slower.
 *
 *   prefetch           compiler builtin
 *   stores past caches SSE2; elsewhere ordinary ones
 *   bytes compared     SSE2; elsewhere one by one
 *   huge pages         Linux madvise; elsewhere ordinary pages
 *   anonymous memory   mmap, aligned by mapping too much and giving the ends back
 */
#ifndef PERSIA_PORTABLE_H
#define PERSIA_PORTABLE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#if defined(__linux__)
#include <errno.h>
#include <sys/syscall.h>
#define PERSIA_KEEP_SIZE 1
#define PERSIA_PUNCH_HOLE 2
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "persia stores signs and rows little-endian; this machine is big-endian"
#endif

#ifndef MAP_ANONYMOUS
#define MAP_ANONYMOUS MAP_ANON
#endif
#ifndef MAP_NORESERVE
#define MAP_NORESERVE 0
#endif

/* The debug build walks every structure after each request. */
#ifndef PERSIA_DEBUG
#define PERSIA_DEBUG 0
#endif

/* Into the second-level cache: a core waits for more lines there than its first level has room for
 * (24 on Zen 4), so that random lines come in half the time. Reading them from there is hidden.
 *
 * The empty asm is the effect without which gcc takes a function of prefetches alone for one
 * that does nothing, and drops its calls. */
static inline void persia_prefetch(const void *address)
{
    __builtin_prefetch(address, 0, 2);
    __asm__ volatile("" : : "r"(address));
}

static inline void persia_prefetch_write(const void *address)
{
    __builtin_prefetch(address, 1, 2);
    __asm__ volatile("" : : "r"(address));
}

/* Copies floats to where this processor will not read them soon: past its caches, so that the
 * line is not read before it is written, nor the lines of others thrown out for it. `out` and the
 * bytes are multiples of 16. Others see it after persia_stream_end. */
static inline void persia_stream_floats(float *out, const float *values, uint32_t count)
{
#if defined(__SSE2__)
    for (uint32_t i = 0; i < count; i += 4)
        _mm_stream_ps(out + i, _mm_loadu_ps(values + i));
#else
    memcpy(out, values, count * sizeof *out);
#endif
}

static inline void persia_stream_end(void)
{
#if defined(__SSE2__)
    _mm_sfence();
#endif
}

/* Which of 16 bytes are equal to one, as bits. */
static inline uint32_t persia_equal_bytes(const uint8_t *bytes, uint8_t to)
{
#if defined(__SSE2__)
    const __m128i all = _mm_loadu_si128((const __m128i *)(const void *)bytes);
    return (uint32_t)_mm_movemask_epi8(_mm_cmpeq_epi8(all, _mm_set1_epi8((char)to)));
#else
    uint32_t found = 0;
    for (int i = 0; i < 16; i++)
        found |= (uint32_t)(bytes[i] == to) << i;
    return found;
#endif
}

static inline uint32_t persia_popcount(uint64_t bits) { return (uint32_t)__builtin_popcountll(bits); }

/* Number of zero bits below the lowest one; the argument is not 0. */
static inline uint32_t persia_lowest_bit(uint64_t bits) { return (uint32_t)__builtin_ctzll(bits); }

/* Zeroed memory, `alignment` (a power of two) aligned; NULL if there is none. Pages become
 * resident at their first touch. */
static inline void *persia_map(size_t bytes, size_t alignment)
{
    size_t total = bytes + alignment;
    char *start = (char *)mmap(NULL, total, PROT_READ | PROT_WRITE,
                               MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (start == (char *)MAP_FAILED)
        return NULL;
    size_t before = (alignment - ((uintptr_t)start & (alignment - 1))) & (alignment - 1);
    if (before > 0)
        munmap(start, before);
    if (total - before > bytes)
        munmap(start + before + bytes, total - before - bytes);
    return start + before;
}

static inline void persia_unmap(void *start, size_t bytes) { munmap(start, bytes); }

/* Give back what is in it and keep the addresses, zeroed; -1: it stays as it is. */
static inline int persia_empty(void *start, size_t bytes)
{
#if defined(__linux__)
    return madvise(start, bytes, MADV_DONTNEED);
#else
    return -1;
#endif
}

/* TLB misses, not cache lines, bound a large store on small pages. */
static inline void persia_advise_huge(void *start, size_t bytes)
{
#if defined(MADV_HUGEPAGE)
    (void)madvise(start, bytes, MADV_HUGEPAGE);
#endif
}

/* Make it resident by touching it, whatever others do with it meanwhile. MADV_POPULATE_WRITE would
 * hold up all who map or unmap. */
static inline void persia_populate(void *start, size_t bytes)
{
    persia_advise_huge(start, bytes);
    for (size_t at = 0; at < bytes; at += 4096)
        (void)__atomic_fetch_or((char *)start + at, 0, __ATOMIC_RELAXED);
}

/* The same for memory that is resident already: it is moved, at once where the system can
 * (Linux 6.1), which 0 says, else by and by. */
static inline int persia_collapse(void *start, size_t bytes)
{
    persia_advise_huge(start, bytes);
#if defined(__linux__)
    return madvise(start, bytes, 25); /* MADV_COLLAPSE, which older headers do not name */
#else
    return -1;
#endif
}

/* --- memory that outlives a process: a file in a tmpfs, mapped ---------------------------- */

/* A killed process has made its stores in the order of its program, as far as anybody can see who
 * reads the pages afterwards: a kill takes effect between two instructions, and the pages are the
 * kernel's. That holds on x86-64 and on aarch64, whatever a second CPU would have seen meanwhile.
 * So only the compiler has to be file from moving stores. (Power failure is another matter: a
 * tmpfs does not survive it.)
 */
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
#endif
}

#endif
