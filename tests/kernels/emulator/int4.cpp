// Entries of the kernels of four-bit weights for the tests; each kernel of the .cu file can be given by its address.
#include "sm90_int4_gemm.cu"

namespace {

struct Launch {
  int ctas, cluster, threads, seed, resident;
  unsigned char* x;
  int64_t x_bytes;
  const unsigned char* out;
  int64_t out_bytes;
};

}  // namespace

// `x_map`: null for kernels that read x by themselves.
extern "C" void run_int4(void* kernel, const CUtensorMap* x_map, const stoker::Int4Arguments* p, const Launch* l) {
  if (l->x_bytes) emulator::predecessor.writes = {{l->x, l->x_bytes}};
  emulator::predecessor.out = l->out, emulator::predecessor.out_bytes = l->out_bytes;
  emulator::resident = l->resident;
  const auto run = [=] {
    if (x_map) {
      reinterpret_cast<void (*)(CUtensorMap, stoker::Int4Arguments)>(kernel)(*x_map, *p);
    } else {
      reinterpret_cast<void (*)(stoker::Int4Arguments)>(kernel)(*p);
    }
  };
  emulator::run_grid(l->ctas, l->threads, l->seed, run, l->cluster);
}

extern "C" int int4_arguments_size() { return sizeof(stoker::Int4Arguments); }
