// The routes of /v1/sessions, and of the stored states of /v1/responses. Functions run on the thread for work and reply
// to the call. The caller replies with the errors that they throw.
#pragma once

#include "efla/serve/api/context.h"

namespace efla::serve {

void list_sessions(ApiContext& context, Call& call);
void create_session(ApiContext& context, Call& call);
void show_session(ApiContext& context, Call& call);
void delete_session(ApiContext& context, Call& call);
void fork_session(ApiContext& context, Call& call);
void rewind_session(ApiContext& context, Call& call);
void download_state(ApiContext& context, Call& call);
void upload_state(ApiContext& context, Call& call);
void delete_response(ApiContext& context, Call& call);

}  // namespace efla::serve
