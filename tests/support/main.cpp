#include "support/ranks.h"

int main(int argc, char** argv) {
  return tessera::testing::run_tests(argc, argv);
}
