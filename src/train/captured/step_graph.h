// What a device needs to do a step again without the host.
#pragma once

#include <c10/core/Device.h>

#include <cstdint>
#include <functional>
#include <memory>

#include "libtorch/recording.h"

namespace tessera::train {

/// A step as a device recorded it.
class StepGraph : public libtorch::Recording {
 public:
  /// From here to end(), what this thread, and a backward that it runs, ask of
  /// the device is recorded and not done. Call both on the recording stream.
  virtual void begin() = 0;
  virtual void end() = 0;
  /// In place of end(), after an exception, also of end() itself: the device
  /// and its generator are as they were before begin().
  virtual void abandon() noexcept = 0;
  /// Does what was recorded, on the caller's stream, without waiting for it.
  /// Random numbers advance as if the step had drawn them.
  virtual void replay() = 0;
};

/// A device that records steps.
class GraphDevice {
 public:
  virtual ~GraphDevice() = default;
  virtual c10::Device device() const = 0;
  virtual std::unique_ptr<StepGraph> make_graph() = 0;
  /// Graphs that were made before this number changed cannot be replayed.
  virtual uint64_t epoch() const = 0;
  /// Runs `work` on the stream that steps are recorded on: after what the
  /// caller's stream has to do, and before what it gets later.
  virtual void on_recording_stream(const std::function<void()>& work) = 0;
};

/// Null for a device that cannot record: the CPU, and a GPU in a build without
/// CUDA's headers.
std::unique_ptr<GraphDevice> make_graph_device(c10::Device device);

/// The same for CUDA, in cuda_graph_device.cpp or no_cuda_graph_device.cpp.
std::unique_ptr<GraphDevice> make_cuda_graph_device(c10::Device device);

using MakeGraphDevice =
    std::function<std::unique_ptr<GraphDevice>(c10::Device)>;
/// Asked before any other as long as it is set; empty: none.
void set_graph_devices_for_tests(MakeGraphDevice make);

} // namespace tessera::train
