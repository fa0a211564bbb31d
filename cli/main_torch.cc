// The program efla-torch: every command of efla (main.cc). Of bench it has only the name.
#include "cli/commands.h"
#include "cli/support/program.h"

#ifdef EFLA_BENCH
void efla::cli::add_bench(CLI::App& program) {
  program.add_subcommand("bench", "Measure the operator, training and generation on this machine (efla-bench)");
}
#endif

int main(int argc, char** argv) {
  using namespace efla::cli;
  return run_efla(argc, argv,
                  {add_info, add_apply, add_data, add_report, add_train, add_eval, add_generate, add_serve,
                   add_reproduce, add_checkpoints,
#ifdef EFLA_BENCH
                   add_bench
#endif
                  });
}
