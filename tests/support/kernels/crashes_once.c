/* SGD that crashes when there is a file MARKER, which it removes before. */
#include <unistd.h>

#include "persia_kernels.h"

static int step(const persia_block_t *rows)
{
    for (size_t i = 0; i < rows->num_rows; i++)
        for (size_t j = 0; j < rows->dim; j++)
            rows->values[i][j] -= (float)rows->lr * rows->grads[i][j];
    if (unlink(MARKER) == 0)
        *(volatile int *)8 = 1;
    return 0;
}

static const persia_optimizer_t optimizer = {.size = sizeof optimizer, .step = step};
PERSIA_EXPORT_KERNELS(.optimizer = &optimizer)
