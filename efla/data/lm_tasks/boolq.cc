// BoolQ: yes-or-no questions about a passage.
#include "efla/data/lm_tasks/readers.h"

namespace efla::data {

MultipleChoice boolq_example(const Record& record) {
  // In SuperGLUE, whose copy the harness reads, the title is part of the passage.
  const auto passage = record.text("title") + " -- " + record.text("passage");
  return choose_answer(passage + "\nQuestion: " + record.text("question") + "?\nAnswer:", {"no", "yes"},
                       record.flag("answer") ? 1 : 0);
}

}  // namespace efla::data
