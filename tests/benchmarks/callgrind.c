/* The two ends of a part that callgrind counts; outside valgrind they do nothing. */
#include <valgrind/callgrind.h>

void part_begin(void)
{
    CALLGRIND_START_INSTRUMENTATION;
    CALLGRIND_ZERO_STATS;
}

void part_end(const char *name)
{
    CALLGRIND_DUMP_STATS_AT(name);
    CALLGRIND_STOP_INSTRUMENTATION;
}
