// Entry of the kernels that make bf16 of experts in four bits, for the tests.
#include "sm90_unpacked_experts.cuh"

extern "C" void unpacked_experts(int kind, int ctas, int seed, const stoker::UnpackArguments* arguments) {
  using stoker::PackedKind;
  void (*const kernels[3])(const stoker::UnpackArguments&) = {stoker::sm90_unpacked_experts<PackedKind::MXFP4>,
                                                              stoker::sm90_unpacked_experts<PackedKind::NVFP4>,
                                                              stoker::sm90_unpacked_experts<PackedKind::INT4>};
  const auto kernel = kernels[kind];
  emulator::run_grid(ctas, stoker::UNPACK_THREADS, seed, [=] { kernel(*arguments); });
}

extern "C" int arguments_size() { return sizeof(stoker::UnpackArguments); }
