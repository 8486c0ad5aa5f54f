/* Classes by sign and chance, or with BY_VALUE by the last value and the last word of state; of new
 * rows the class is 15, unless it is 2. */
#include "persia_kernels.h"

#ifdef TAG /* another library that does the same */
__attribute__((used)) static const int tag = TAG;
#endif

static uint32_t score(const persia_use_t *use)
{
#ifdef CRASH_AT
    if ((use->sign & 0xFFFF) == CRASH_AT)
        *(volatile int *)8 = 1;
#endif
#ifdef COUNTS
    static uint32_t count;
    return count++ & 15;
#endif
#ifdef BY_VALUE
    if (use->is_new && BY_VALUE != 2)
        return 15;
    const float value = use->values[use->dim - 1];
    return (uint32_t)(use->num_state_words ? value + use->state[use->num_state_words - 1] : value);
#else
    return use->is_new ? (uint32_t)(use->sign % 3) : use->before + (uint32_t)(use->draw & 1);
#endif
}

static const persia_scorer_t scorer = {.size = sizeof(persia_scorer_t), .score = score};
PERSIA_EXPORT_KERNELS(.scorer = &scorer)
