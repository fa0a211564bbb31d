// The program efla-bench, which `efla bench` runs.
#include "cli/commands.h"
#include "cli/support/program.h"

int main(int argc, char** argv) {
  using namespace efla::cli;
  return run_program("efla bench", "Measure the operator, training and generation on this machine.", argc, argv,
                     {add_benchmarks});
}
