// Saves twice to the same folder; in the second save one rank kills itself.
// usage: crash_subject FOLDER RANK OPERATION
#include <tessera/checkpoint/checkpoint.h>
#include <tessera/comm/init.h>

#include <torch/torch.h>

#include <csignal>
#include <cstdlib>
#include <iostream>

#include "checkpoint/disk/files.h"
#include "checkpoint/support.h"

int main(int argc, char** argv) {
  if (argc != 4) {
    return 2;
  }
  const auto world = tessera::init();
  const std::filesystem::path folder = std::string(argv[1]) + "/c";
  const auto save = [&](int version) {
    tessera::checkpoint::save(
        {{"v",
          tessera::testing::cut(
              torch::full({30, 3}, static_cast<float>(version)),
              tessera::testing::Cut::Rows,
              world)},
         {"version", version}},
        folder,
        tessera::checkpoint::SaveOptions().overwrite(true));
  };
  save(1);
  std::cout << "first save done" << std::endl;
  if (world.rank() == std::atoi(argv[2])) {
    int left = std::atoi(argv[3]);
    tessera::checkpoint::set_file_fault(
        [&](tessera::checkpoint::FileOp, const std::filesystem::path&) {
          if (left-- == 0) {
            ::raise(SIGKILL);
          }
          return 0;
        });
  }
  save(2);
  return 0;
}
