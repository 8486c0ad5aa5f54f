/* Which kernel variants this processor and its operating system can run. */
#ifndef PERSIA_ISA_H
#define PERSIA_ISA_H

#if defined(__x86_64__)

#include <cpuid.h>

/* 0 baseline, 1 avx2 and f16c, 2 avx512 f/vl/bw/dq on top. */
static int persia_best_level(void)
{
    unsigned a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    /* 27: the system saves extended registers; 28: avx; 29: f16c. */
    const unsigned needed = 1u << 27 | 1u << 28 | 1u << 29;
    if ((c & needed) != needed)
        return 0;
    unsigned saved, saved_high;
    __asm__ volatile("xgetbv" : "=a"(saved), "=d"(saved_high) : "c"(0));
    if ((saved & 0x06) != 0x06) /* xmm and ymm */
        return 0;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || !(b & 1u << 5))
        return 0;
    /* 16: f; 17: dq; 30: bw; 31: vl. State bits 5..7: masks, zmm. */
    const unsigned wide = 1u << 16 | 1u << 17 | 1u << 30 | 1u << 31;
    return (b & wide) == wide && (saved & 0xE6) == 0xE6 ? 2 : 1;
}

#else

static int persia_best_level(void)
{
    return 0;
}

#endif

#endif
