import { setUpVideo } from "./video.js";

setUpVideo(document.querySelector("#watch-body"), { onDeleted: () => location.assign("/") });
