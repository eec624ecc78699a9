// Entries of the kernels of GGUF's blocks for the tests; each kernel of the .cu file can be given by its address.
#include "sm90_blocks_few.cu"

namespace {

struct Launch {
  int ctas, cluster, threads, seed;
  unsigned char* x;
  int64_t x_bytes;
  const unsigned char* out;
  int64_t out_bytes;
};

}  // namespace

extern "C" void run_blocks(void* kernel, const stoker::BlockArguments* p, const Launch* l) {
  if (l->x_bytes) emulator::predecessor.writes = {{l->x, l->x_bytes}};
  emulator::predecessor.out = l->out, emulator::predecessor.out_bytes = l->out_bytes;
  const auto run = [=] { reinterpret_cast<void (*)(stoker::BlockArguments)>(kernel)(*p); };
  emulator::run_grid(l->ctas, l->threads, l->seed, run, l->cluster);
}

extern "C" int block_arguments_size() { return sizeof(stoker::BlockArguments); }
