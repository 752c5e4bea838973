// Start of the page, after all other files.
"use strict";

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("baton-key", byId("key").value.trim());
  byId("key").value = "";
  state.asksForKey = false;
});
startFleet();
startPlots();
startRequests();
startChat();
startStories();
poll();
