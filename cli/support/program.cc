#include "cli/support/program.h"

#include <fcntl.h>
#include <fmt/core.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <new>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cli/support/print.h"
#include "efla/base/error.h"
#include "efla/base/printable.h"
#include "efla/base/text.h"
#include "efla/base/version.h"

namespace efla::cli {

// Prints the first line of a message, because some libraries append a stack trace. Replaces control characters, which
// names from foreign files may have.
int report(int code, std::string_view message) {
  constexpr std::size_t kLongest = 4000;
  print_or_drop(stderr, "efla: " + printable(message.substr(0, message.find('\n')), kLongest) + "\n");
  return code;
}

namespace {

constexpr std::string_view kName = "efla";  // and the first word of the name of every other program
constexpr const char* kNoMemory = "not enough memory";
constexpr const char* kNoGpuMemory =
    "not enough memory on the GPU; less at a time needs less: training.micro_batch (or training.recompute = true) of "
    "train lm, --batch-size of train smnist, --batch of eval lm, --state-memory of serve, --threads of reproduce, or "
    "--device cpu";

[[noreturn]] void end_at_uncaught_exception() {
  try {
    if (const auto exception = std::current_exception()) std::rethrow_exception(exception);
    report(kFailure, "ended by std::terminate");
  } catch (const std::bad_alloc&) {
    report(kFailure, kNoMemory);
  } catch (const std::exception& error) {
    report(kFailure, error.what());
  } catch (...) {
    report(kFailure, "ended by an exception of an unknown type");
  }
  std::_Exit(kFailure);
}

}  // namespace

void report_uncaught_exceptions() { std::set_terminate(end_at_uncaught_exception); }

namespace {

// Returns a plain message in place of LibTorch's messages about missing memory, and other messages as they are.
std::string_view words_for(std::string_view message) {
  const auto says = [&](std::string_view part) { return message.find(part) != std::string_view::npos; };
  if (says_no_gpu_memory(message)) return kNoGpuMemory;
  return says("DefaultCPUAllocator") && says("can't allocate memory") ? kNoMemory : message;
}

// Opens standard streams that the caller closed, because the next opened file would get such a number, and what is
// printed.
void open_standard_streams() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (fcntl(fd, F_GETFD) < 0) open("/dev/null", O_RDWR);
  }
}

// The command line as far as it was understood: "apply", "bench serve", "" for the program efla itself.
struct Position {
  const CLI::App* app;
  std::string path;
};

Position deepest(const CLI::App& program) {
  std::string name = program.get_name();
  Position at{&program, name == kName ? "" : name.substr(kName.size() + 1)};
  while (!at.app->get_subcommands().empty()) {
    at.app = at.app->get_subcommands().front();
    at.path += (at.path.empty() ? "" : " ") + at.app->get_name();
  }
  return at;
}

std::vector<std::string> option_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* option : app.get_options()) {
    for (const auto& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const auto* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

std::string joined(const std::vector<std::string>& names) {
  std::string text;
  for (const auto& name : names) text += (text.empty() ? "" : ", ") + name;
  return text;
}

// Returns, for example, "--scale: got 'two', expected NUMBER" for CLI11's "Could not convert: --scale = two".
std::string conversion_message(const CLI::App& app, std::string_view message) {
  for (const auto* option : app.get_options()) {
    const std::string start = "Could not convert: " + option->get_name() + " = ";
    if (!message.starts_with(start)) continue;
    const auto type = option->get_type_name();
    return option->get_name() + ": got '" + std::string(message.substr(start.size())) + "', expected " +
           (type.empty() ? "no value" : type);
  }
  return std::string(message);
}

// Returns, for example, "--port: got 70000, expected 0 to 65535" for CLI11's "--port: Value 70000 not in range 0 to
// 65535".
std::string range_message(std::string message) {
  constexpr std::string_view kGot = ": Value ", kRange = " not in range ";
  const auto range = message.rfind(kRange), got = message.find(kGot);
  if (got == std::string::npos || range == std::string::npos) return message;
  message.replace(range, kRange.size(), ", expected ");
  return message.replace(got, kGot.size(), ": got ");
}

// Returns, for example, "--weights: got int4, expected float32, bfloat16" for CLI11's "--weights: int4 not in
// {float32,bfloat16}".
std::string member_message(std::string message) {
  constexpr std::string_view kSet = " not in {";
  const auto got = message.find(": "), set = message.rfind(kSet);
  if (got == std::string::npos || set == std::string::npos || !message.ends_with('}')) return message;
  std::string names = message.substr(set + kSet.size(), message.size() - set - kSet.size() - 1);
  for (std::size_t at = 0; (at = names.find(',', at)) != std::string::npos; at += 2) names.replace(at, 1, ", ");
  return message.substr(0, got) + ": got " + message.substr(got + 2, set - got - 2) + ", expected " + names;
}

// Returns what is wrong with a whole number that 64 bits cannot hold, or "". CLI11 would turn such a number into the
// nearest of 64 bits.
std::string beyond_64_bits(const std::string& text) {
  errno = 0;
  std::strtoll(text.c_str(), nullptr, 0);
  return errno == ERANGE ? "got " + text + ", expected a whole number between -2^63 and 2^63" : "";
}

// Adds the check for whole numbers to the options of all commands. CLI11 names their type INT. The range of
// seeds, which are UINT, is checked already.
void check_whole_numbers(CLI::App& app) {
  for (auto* option : app.get_options()) {
    if (option->get_type_name().starts_with("INT")) option->check(beyond_64_bits);
  }
  for (auto* command : app.get_subcommands([](CLI::App*) { return true; })) check_whole_numbers(*command);
}

// Adds a check to the options of all commands that refuses an empty text, which an unset shell variable gives, because
// commands take an empty text for an option that was not given. An empty prompt or separator means something, and an
// empty stop text is refused elsewhere.
void check_texts(CLI::App& app) {
  for (auto* option : app.get_options()) {
    if (option->check_lname("prompt") || option->check_lname("separator") || option->check_lname("stop")) continue;
    option->check([](const std::string& text) -> std::string {
      return text.empty() ? "got an empty text, expected one that is not empty" : "";
    });
  }
  for (auto* command : app.get_subcommands([](CLI::App*) { return true; })) check_texts(*command);
}

// Returns what is wrong with a command line that `program` could not parse.
std::string usage_message(const CLI::App& program, const CLI::ParseError& error) {
  const auto [app, path] = deepest(program);
  const std::string prefix = path.empty() ? "" : path + ": ";
  const std::string help = " (see " + std::string(kName) + (path.empty() ? "" : " " + path) + " --help)";
  const auto commands = subcommand_names(*app);
  const auto leftover = program.remaining(true);
  if (!leftover.empty()) {
    const std::string name = leftover.front().substr(0, leftover.front().find('='));
    if (name.starts_with("-")) {
      return prefix + "unknown option '" + name + "', nearest is " + nearest_name(name, option_names(*app)) + help;
    }
    if (!commands.empty()) {
      return prefix + "unknown command '" + name + "', nearest is " + nearest_name(name, commands) + help;
    }
    return prefix + "unexpected argument '" + leftover.front() + "'" + help;
  }
  if (!commands.empty()) return prefix + "no command given, expected one of " + joined(commands) + help;
  if (error.get_name() == "ConversionError") return prefix + conversion_message(*app, error.what()) + help;
  return prefix + member_message(range_message(error.what())) + help;
}

// Returns what the user types for a library's argument of this name: "--state-memory" for state_memory, "MODEL" for
// model. Returns "" where the command has nothing of the name.
std::string typed_name(const CLI::App& app, std::string argument) {
  std::replace(argument.begin(), argument.end(), '_', '-');
  for (const auto* option : app.get_options()) {
    if (option->check_lname(argument)) return "--" + argument;
    if (option->get_positional() && CLI::detail::to_lower(option->get_single_name()) == argument) {
      return option->get_single_name();
    }
  }
  return "";
}

// Returns an error's message. An argument that the command line sets is named as it is there: "serve: --state-memory"
// for "engine: state_memory". The option may have the plural or the singular of the argument's name.
std::string message_of(const CLI::App& program, const Error& error) {
  if (dynamic_cast<const FieldError*>(&error) != nullptr) return error.what();
  const auto [app, command] = deepest(program);
  const std::string& argument = error.argument();
  std::string typed = typed_name(*app, argument);
  if (typed.empty()) typed = typed_name(*app, argument + "s");
  if (typed.empty() && argument.ends_with('s')) typed = typed_name(*app, argument.substr(0, argument.size() - 1));
  if (typed.empty()) return error.what();
  return Error(command, typed, error.got(), error.expected()).what();
}

int parse_and_run(CLI::App& program, int argc, char** argv) {
  try {
    program.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    fmt::print("{}", program.help());
  } catch (const CLI::CallForVersion&) {
    fmt::print("efla {}\n", version());
  } catch (const CLI::RuntimeError& error) {  // a subcommand's own exit code, after its message
    return error.get_exit_code();
  } catch (const CLI::ParseError& error) {
    return report(kUserMistake, usage_message(program, error));
  }
  flush_standard_output();
  return 0;
}

}  // namespace

void end_program(std::string_view message) { std::_Exit(report(kFailure, message)); }

int run_program(const char* name, const char* about, int argc, char** argv,
                std::initializer_list<AddCommand> commands) {
  open_standard_streams();
  report_uncaught_exceptions();
  // A write beyond the limit on file sizes then fails like one to a full disk, and what was written is removed.
  std::signal(SIGXFSZ, SIG_IGN);
  // A reader of progress messages may close the pipe before the command ends.
  const auto at_closed_pipe = std::signal(SIGPIPE, SIG_IGN);
  CLI::App program(about, name);
  program.set_version_flag("--version", std::string(version()), "Print the version and exit");
  program.set_help_flag("-h,--help", "Print this help and exit");
  program.require_subcommand(1);
  program.option_defaults()->take_last();  // of an option given twice the last counts, as in other programs
  for (const auto add : commands) add(program);
  check_whole_numbers(program);
  check_texts(program);
  try {
    return parse_and_run(program, argc, argv);
  } catch (const Error& error) {
    return report(kUserMistake, message_of(program, error));
  } catch (const IoError& error) {
    return report(error.kind() == IoError::Kind::system ? kFailure : kUserMistake, error.what());
  } catch (const std::filesystem::filesystem_error& error) {
    return report(kFailure, error.path1().string() + ": " + error.code().message());
  } catch (const std::system_error& error) {
    if (error.code() != std::errc::broken_pipe) return report(kFailure, error.what());
    // The reader of the results has closed the pipe: ends as programs do that do not ignore SIGPIPE.
    std::signal(SIGPIPE, at_closed_pipe);
    std::raise(SIGPIPE);
    return kFailure;
  } catch (const std::bad_alloc&) {
    return report(kFailure, kNoMemory);
  } catch (const std::exception& error) {
    return report(kFailure, words_for(error.what()));
  }
}

int run_efla(int argc, char** argv, std::initializer_list<AddCommand> commands) {
  return run_program(kName.data(),
                     "Error-free linear attention: the exact delta rule, and models that are trained with it.", argc,
                     argv, commands);
}

}  // namespace efla::cli
