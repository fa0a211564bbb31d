#include "cli/support/output_file.h"

#include <system_error>

#include "efla/base/error.h"
#include "efla/io/file.h"

namespace efla::cli {

void check_output_file(const std::string& command, const std::string& option, const std::filesystem::path& out,
                       const std::filesystem::path& input) {
  std::error_code error;
  const auto folder = std::filesystem::absolute(out).parent_path();
  if (!std::filesystem::is_directory(folder, error)) {
    throw Error(command, option, out.string(), "a file in a folder that exists; " + folder.string() + " does not");
  }
  const auto status = std::filesystem::status(out, error);
  if (status.type() == std::filesystem::file_type::none) {
    throw Error(command, option, out.string(), "a file name that the system takes (" + error.message() + ")");
  }
  if (std::filesystem::is_directory(status)) {
    throw Error(command, option, "the folder " + out.string(), "a file name");
  }
  if (std::filesystem::exists(status) && !std::filesystem::is_regular_file(status)) {
    throw Error(command, option, out.string() + ", which is not a regular file", "a file name");
  }
  if (std::filesystem::equivalent(out, input, error)) {  // through links too; false where one of them does not exist
    throw Error(command, option, out.string() + ", which is the input " + input.string(), "another file");
  }
  io::remove_stale_temporaries(folder, out.filename().string());
}

}  // namespace efla::cli
