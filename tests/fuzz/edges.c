/* Which edges of the scanner's control flow an input took for the first time: gcc calls the first
 * function at every basic block (-fsanitize-coverage=trace-pc), tests/fuzz/sanitized.py the other. */
#include <stdint.h>

static uint8_t seen[1 << 16];
static uintptr_t before;
static int fresh;

__attribute__((visibility("hidden"), no_sanitize_coverage)) void __sanitizer_cov_trace_pc(void) {
    uintptr_t here = (uintptr_t)__builtin_return_address(0);
    uint8_t *edge = &seen[(here ^ before << 1) & 0xffff];
    before = here;
    if (!*edge) { *edge = 1; fresh++; }
}

int fresh_edges(void) {
    int found = fresh;
    fresh = 0;
    return found;
}
