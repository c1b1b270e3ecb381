#pragma once

namespace fake_cuda {

struct ErrorText {
  int number;
  const char *driver, *runtime, *text;
};

const ErrorText* error_text(int number);  // null for a number that the fake does not use
const ErrorText* error_text_or_unknown(int number);

}  // namespace fake_cuda
