// Ranges that NVIDIA's profilers show over what the calling thread issues.
#pragma once

namespace slidedp {

void push_profiler_range(const char* name);
void pop_profiler_range();

}  // namespace slidedp
