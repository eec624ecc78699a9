// Kernels that break a rule each, for the tests of the emulator itself.
#include "ptx.cuh"

namespace {

using namespace stoker;

constexpr uint32_t BARRIER = emulator::SHARED_BASE, DATA = emulator::SHARED_BASE + 1024;
alignas(16) float values[64 * 32];
const CUtensorMap MAP{reinterpret_cast<unsigned char*>(values), 2, 4, {32, 64}, {4, 128}, {32, 8}};

void one_box(int expected) {
  if (threadIdx.x == 0) {
    mbarrier_init(BARRIER, 1);
    mbarrier_arrive_expect(BARRIER, expected);
    tensor_load_2d(DATA, &MAP, 0, 0, BARRIER, 0);
  }
  __syncthreads();
  mbarrier_wait(BARRIER, 0);
}

void next_phase() {
  one_box(1024);
  mbarrier_wait(BARRIER, 1);
}

// CTA 0 sends a box to both. `waits`: for the other to set up its barrier; `stays`: CTA 1, until the box is there.
void multicast(bool waits, bool stays) {
  if (threadIdx.x == 0) {
    mbarrier_init(BARRIER, 1);
    mbarrier_arrive_expect(BARRIER, 1024);
  }
  __syncthreads();
  cluster_arrive();
  if (waits) cluster_wait();
  if (cluster_rank() == 0 && threadIdx.x == 0) tensor_multicast_2d(DATA, &MAP, 0, 0, BARRIER, 3, 0);
  if (cluster_rank() == 0 || stays) mbarrier_wait(BARRIER, 0);
}

void overwrite() {
  if (threadIdx.x != 0) return;
  mbarrier_init(BARRIER, 1);
  *emulator::shared(BARRIER + 7) = 0;
  mbarrier_arrive(BARRIER);
}

void store_alone() {
  if (threadIdx.x != 0) return;
  mbarrier_init(BARRIER, 1);
  store_async(DATA, 0, 0, 0, 0, BARRIER);
}

void break_rule(int rule) {
  switch (rule) {
    case 0: return multicast(true, true);  // none
    case 1: return next_phase();
    case 2: return one_box(2048);
    case 3: return one_box(512);
    case 4: return multicast(false, true);
    case 5: return multicast(true, false);
    case 6: return registers_grow<232>();
    case 7: return cluster_wait();
    case 8: return mbarrier_arrive(BARRIER);
    case 9:
      if (threadIdx.x == 0) cluster_arrive();  // not the whole warp
      return;
    case 10: return overwrite();
    case 11: return store_alone();
  }
}

}  // namespace

extern "C" void run_fault(int rule) {
  const int cluster = rule == 11 ? 1 : 2;
  for (int seed = 0; seed < 8; ++seed) emulator::run_grid(2, 384, seed, [=] { break_rule(rule); }, cluster);
}
