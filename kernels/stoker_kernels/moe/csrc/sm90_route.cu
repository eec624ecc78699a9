// Choosing and sorting for some dozens of tokens; see sm90_route.cuh.
#include "sm90_route.cuh"

extern "C" __global__ void __launch_bounds__(stoker::ROUTE_MOST_THREADS, 1)
    sm90_route(const __grid_constant__ stoker::RouteArguments a) {
  stoker::sm90_route(a, blockDim.x);
}
