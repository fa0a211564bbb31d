// The program efla-torch: every command of efla (main.cc).
#include "cli/commands.h"
#include "cli/program.h"

int main(int argc, char** argv) {
  using namespace efla::cli;
  return run_program(
      argc, argv,
      {add_info, add_apply, add_data, add_report, add_train, add_eval, add_generate, add_reproduce, add_checkpoints,
#ifdef EFLA_BENCH
       add_bench
#endif
      });
}
