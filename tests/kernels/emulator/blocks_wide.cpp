// Entries of the kernels of many tokens with GGUF's blocks, which can be given by their addresses.
#include "launch.h"
#include "sm90_blocks_wide.cu"

extern "C" void run_blocks_wide(void* kernel, const CUtensorMap* x_map, const stoker::PlaneMaps* maps,
                                const stoker::WideBlockArguments* p, const Launch* l) {
  emulator::in_order = p->parts != nullptr;
  run(l, [=] {
    using Kernel = void (*)(CUtensorMap, stoker::PlaneMaps, stoker::WideBlockArguments);
    reinterpret_cast<Kernel>(kernel)(*x_map, *maps, *p);
  });
}

extern "C" int wide_block_arguments_size() { return sizeof(stoker::WideBlockArguments); }
extern "C" int plane_maps_size() { return sizeof(stoker::PlaneMaps); }
