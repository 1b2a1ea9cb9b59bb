// Which instruction set the CPU kernels use, decided once per process; sizes of caches.
#pragma once

#include <cstdint>

namespace specdec {

// Each level includes the ones before it.
enum class CpuIsa { kPlain, kAvx2, kAvx512, kAvx512Bf16, kAmx };

// The best level of this machine, capped by the environment variable SPECDEC_CPU_ISA
// (plain | avx2 | avx512 | avx512_bf16 | amx), which is read at the first call. Results of
// different levels may differ in the last bits; within a level they do not depend on rows or
// threads. Errors: std::invalid_argument for an unknown name.
CpuIsa cpu_isa();

const char* cpu_isa_name(CpuIsa isa);

// What cpuid and the operating system allow; cpu_features_x86.cc or cpu_features_generic.cc.
CpuIsa detect_cpu_isa();
// The processor has tiles of bf16 (AMX), and the operating system has given this process their
// registers, which this asks for; amx_linux.cc or amx_none.cc.
bool may_use_amx();

// The second-level cache of the first core, from Linux's description; 0 without one.
std::int64_t second_level_cache_bytes();

}  // namespace specdec
