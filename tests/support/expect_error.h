// Expectations on efla's exceptions.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include <gtest/gtest.h>

#include "efla/base/error.h"

namespace efla::test {

// Expects that action throws IoError of the kind, at the byte offset (−1: none), with a message that contains `says`.
inline void expect_io_error(const std::function<void()>& action, IoError::Kind kind, std::int64_t offset,
                            const std::string& says) {
  try {
    action();
    ADD_FAILURE() << "nothing thrown, expected an IoError that says: " << says;
  } catch (const IoError& error) {
    EXPECT_EQ(static_cast<int>(error.kind()), static_cast<int>(kind)) << error.what();
    EXPECT_EQ(error.offset(), offset) << error.what();
    EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what() << "\nexpected: " << says;
  }
}

inline void expect_bad_content(const std::function<void()>& action, std::int64_t offset, const std::string& says) {
  expect_io_error(action, IoError::Kind::content, offset, says);
}

// Expects that action throws efla::Error about the argument, with a message that contains `says`.
inline void expect_error(const std::function<void()>& action, const std::string& argument, const std::string& says) {
  try {
    action();
    ADD_FAILURE() << "nothing thrown, expected an Error about " << argument;
  } catch (const Error& error) {
    EXPECT_EQ(error.argument(), argument) << error.what();
    EXPECT_NE(std::string(error.what()).find(says), std::string::npos) << error.what() << "\nexpected: " << says;
  }
}

}  // namespace efla::test
