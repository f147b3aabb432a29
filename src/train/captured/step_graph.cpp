#include "train/captured/step_graph.h"

#include <utility>

namespace tessera::train {
namespace {

MakeGraphDevice& devices_of_tests() {
  static auto& make = *new MakeGraphDevice;
  return make;
}

} // namespace

std::unique_ptr<GraphDevice> make_graph_device(c10::Device device) {
  if (devices_of_tests()) {
    return devices_of_tests()(device);
  }
  return device.is_cuda() ? make_cuda_graph_device(device) : nullptr;
}

void set_graph_devices_for_tests(MakeGraphDevice make) {
  devices_of_tests() = std::move(make);
}

} // namespace tessera::train
