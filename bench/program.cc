#include "bench/program.h"

#include <fmt/format.h>

#include <cstdio>
#include <filesystem>

#include "efla/base/error.h"

namespace efla::bench {

int run_program(CLI::App& program, int argc, char** argv, const std::function<bool(const std::string& command)>& run) {
  std::string command;
  for (int i = 0; i < argc; ++i) command += std::string(i > 0 ? " " : "") + argv[i];
  try {
    program.parse(argc, argv);
    return run(command) ? 0 : 1;
  } catch (const CLI::Success& success) {
    return program.exit(success);
  } catch (const CLI::ParseError& error) {
    program.exit(error);
    return 2;
  } catch (const Error& error) {
    fmt::print(stderr, "{}\n", error.what());
    return 2;
  } catch (const std::exception& error) {
    const std::string what = error.what();
    fmt::print(stderr, "{}: {}\n", std::filesystem::path(argv[0]).filename().string(), what.substr(0, what.find('\n')));
    return 1;
  }
}

}  // namespace efla::bench
