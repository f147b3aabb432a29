#include <tessera/tessera.h>

#include <ATen/ops/ones.h>

#include <cstdio>

int main() {
  const auto world = tessera::init();
  auto tensor = at::ones({4});
  world.all_reduce(tensor);
  std::printf(
      "tessera %s on LibTorch %s: rank %d of %d, sum %g\n",
      tessera::version(),
      tessera::libtorch_version(),
      world.rank(),
      world.size(),
      tensor[0].item<double>());
  return tensor[0].item<double>() == world.size() ? 0 : 1;
}
