// The service `efla serve`: routes requests of HTTP to an engine.
#pragma once

#include <memory>
#include <string>

#include "efla/serve/api/generation.h"
#include "efla/serve/api/keys.h"
#include "efla/serve/http/http.h"

namespace efla::serve {

class Service {
 public:
  // Listens from now on. The engine must outlive the service. Throws what HttpServer throws.
  Service(engine::Engine& engine, ApiOptions options, Keys keys, const HttpOptions& http);
  ~Service();
  Service(const Service&) = delete;
  Service& operator=(const Service&) = delete;

  const std::string& address() const;

  // Serves until SIGINT or SIGTERM (`signals`) or stop(). Then new requests for text and /health get status 503. run()
  // returns once every reply is finished; after `grace` it cancels the unfinished replies. A second signal cancels them
  // at once. Returns false, less than five seconds after `grace`, if the work for a request still goes on: then the
  // destructor waits for it.
  [[nodiscard]] bool run(std::chrono::milliseconds grace, bool signals);

  // Stops run(). Any thread may call it.
  void stop(std::chrono::milliseconds grace);

 private:
  class Implementation;
  std::unique_ptr<Implementation> implementation_;
};

}  // namespace efla::serve
