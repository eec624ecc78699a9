// Entries of the kernels of GGUF's blocks for the tests; each kernel of the .cu file can be given by its address.
#include "launch.h"
#include "sm90_block_rows.cu"
#include "sm90_blocks_few.cu"

extern "C" void run_blocks(void* kernel, const stoker::BlockArguments* p, const Launch* l) {
  run(l, [=] { reinterpret_cast<void (*)(stoker::BlockArguments)>(kernel)(*p); });
}

extern "C" void run_block_rows(void* kernel, const stoker::RowsArguments* p, const Launch* l) {
  run(l, [=] { reinterpret_cast<void (*)(stoker::RowsArguments)>(kernel)(*p); });
}

extern "C" int block_arguments_size() { return sizeof(stoker::BlockArguments); }
extern "C" int rows_arguments_size() { return sizeof(stoker::RowsArguments); }
